"""Small cases that several tests of faults start from."""

from eyas.engines.fake.engine import FakeEngine
from eyas.store.manifest import StoreManifest
from eyas.types import HiddenStates
from tiny import make_spec, random_samples


def one_sample_store() -> tuple[list[HiddenStates], StoreManifest]:
    """Return the states of one sample and the manifest of a store of one shard that takes them."""
    spec = make_spec()
    states = [s for s in FakeEngine(None, spec).capture(random_samples(1, 50)) if isinstance(s, HiddenStates)]
    return states, StoreManifest(spec, "data", (0, 1))
