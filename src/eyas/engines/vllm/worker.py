"""What eyas adds to vLLM's worker class (``worker_extension_cls``): called over rpc.py, by name."""

from pathlib import Path
from typing import Any

from eyas.engines.vllm.hooks import StreamHooks


class EyasWorker:
    """Mixed into vLLM's worker; its names must not meet the worker's own."""

    # The attributes of vLLM's worker that are used here.
    rank: int
    model_runner: Any
    eyas_hooks: StreamHooks

    def eyas_rpc(self, method: str, args: list[Any]) -> dict[str, Any]:
        """Run one of the methods below and say which rank this is; errors travel as values."""
        reply: dict[str, Any] = {"rank": self.rank, "value": None, "error": None}
        try:
            reply["value"] = getattr(self, f"eyas_{method}")(*args)
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        return reply

    def eyas_describe(self) -> dict[str, Any]:
        """Return the shape of the model as this rank has loaded it."""
        config = self.model_runner.model_config
        text = config.hf_text_config
        return {
            "num_layers": text.num_hidden_layers,
            "hidden_size": config.get_hidden_size(),
            "dtype": str(config.dtype).removeprefix("torch."),
        }

    def eyas_install_hooks(self, num_layers: int, layer_ids: list[int], folder: str) -> int:
        """Start capturing in this worker; return the number of layers hooked."""
        self.eyas_hooks = StreamHooks(self.model_runner, self.rank, num_layers, layer_ids, Path(folder))
        return len(self.eyas_hooks.layer_ids)
