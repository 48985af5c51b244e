"""The toy engine computes with transformers."""

from eyas.engines.transformers.engine import TransformersEngine


class ToyEngine(TransformersEngine):
    streams = True
