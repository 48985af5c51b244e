"""serve-capture: a server that captures for ``extract --endpoint``, or the command that starts it."""

import os
import sys

from eyas.engines.info import EngineInfo, engine_info, engines_that
from eyas.progress import say
from eyas.stages.run_context import RunContext


def serve_capture(context: RunContext, print_only: bool, host: str, port: int) -> None:
    """Print the command on stdout, or become it. Raises: UserError for what the engine cannot capture."""
    info = _engine(context.config.extract.engine)
    server = info.capture_server(
        context.config, context.target_folder, context.spec, host, port, here=not print_only
    )
    if print_only:
        print(server.text)
        say(f"serve-capture: eyas has to be installed next to that {info.title}; then capture with:")
        say(f"  eyas extract ... --endpoint http://{host}:{port}/v1")
        return
    program = sys.executable if server.words[0] == "python" else server.words[0]
    os.execvpe(program, [program, *server.words[1:]], os.environ | server.variables)


def _engine(name: str) -> EngineInfo:
    """Return the run's engine, or the first one whose servers capture."""
    info = engine_info(name)
    return info if info.captures_remotely else engines_that(lambda other: other.captures_remotely)[0]
