"""serve-capture: a vLLM server that captures for ``extract --endpoint``, or the command that starts it."""

import os
import sys
from pathlib import Path

from eyas.engines.vllm.engine_args import Plan, as_shell, environment, serve_command
from eyas.engines.vllm.state_transfer import staging_base
from eyas.engines.vllm.versions import (
    check_parallel,
    choose_way,
    installed_version,
    is_cpu_build,
    is_installed,
)
from eyas.progress import say
from eyas.stages.run_context import RunContext


def serve_capture(context: RunContext, print_only: bool, host: str, port: int) -> None:
    """Print the command on stdout, or become it. Raises: UserError for what vLLM cannot capture."""
    spec, settings = context.spec, context.config.vllm
    check_parallel(spec, settings.tensor_parallel_size)
    # Where only the command is wanted, vLLM may be elsewhere; extract asks the server for its version.
    if is_installed() or not print_only:
        choose_way("native", installed_version(), spec, settings.tensor_parallel_size)
    plan = Plan(
        context.target_folder,
        spec,
        settings,
        min(context.config.data.max_length, spec.max_position_embeddings) + 1,
        context.config.extract.batch_tokens,
        context.config.extract.batch_size,
        context.config.target.trust_remote_code,
        "native",
    )
    words = serve_command(plan, _folder(context), on_cpu=is_cpu_build(), host=host, port=port)
    if print_only:
        print(as_shell(words, environment(plan)))
        say("serve-capture: eyas has to be installed beside that vLLM; then capture with:")
        say(f"  eyas extract ... --endpoint http://{host}:{port}/v1")
        return
    program = sys.executable if words[0] == "python" else words[0]
    os.execvpe(program, [program, *words[1:]], os.environ | environment(plan))


def _folder(context: RunContext) -> Path:
    """Return where the server writes: one folder a target, so that two servers do not meet."""
    base = context.config.vllm.staging_dir or staging_base(context.config.vllm.staging_bytes)
    return base.absolute() / f"eyas-serve-{context.spec.weights_fingerprint}"
