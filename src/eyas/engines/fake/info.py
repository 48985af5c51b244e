"""Facts of the fake engine."""

from eyas.engines.info import EngineInfo

INFO = EngineInfo("fake", "fake", engine="eyas.engines.fake.engine:FakeEngine", captures=True, generates=True)
