"""doctor: what would stop a run, looked for before it starts; each finding with its remedy."""

from collections.abc import Iterator

from eyas.config.load import LoadedConfig
from eyas.errors import EyasError
from eyas.findings import Finding
from eyas.plan.machine import machine_findings


def examine(loaded: LoadedConfig | None) -> list[Finding]:
    """Look at the machine, and with a configuration at the run's target, folders and servers."""
    found = list(machine_findings(loaded.config if loaded else None))
    return [*found, *_target(loaded)] if loaded else found


def print_findings(findings: list[Finding]) -> None:
    """Print a line for each finding on stdout, and how many are not well."""
    for finding in findings:
        print(f"{finding.state:<8} {finding.subject:<12} {finding.text}")
        if finding.remedy:
            print(f"{'':<22}{finding.remedy}")
    problems, warnings = (sum(f.state == s for f in findings) for s in ("problem", "warning"))
    print(f"\n{problems} problems, {warnings} warnings")


def _target(loaded: LoadedConfig) -> Iterator[Finding]:
    from eyas.plan.target_size import read_target_size
    from eyas.stages.check_settings import problems
    from eyas.stages.run_context import RunContext

    context = RunContext(loaded)
    try:
        shape = read_target_size(loaded.config.target, context.default_aux_layer_ids)
    except EyasError as error:
        yield Finding("target", "problem", error.what, error.hint)
        return
    text = f"{shape.spec.architecture}, {shape.spec.num_layers} layers, {shape.weight_bytes / 1e9:,.1f} GB"
    if shape.trouble:
        yield Finding("target", "problem", shape.trouble, "run eyas config to see which setting names it")
        return
    yield Finding("target", "ok", text)
    tokenizer = context.tokenizer
    yield Finding(
        "tokenizer", "ok", f"{len(tokenizer):,} ids, ends an answer with {shape.spec.eos_token_ids}"
    )
    yield Finding("template", "ok", f"{len(str(tokenizer.chat_template)):,} characters, fingerprint "
                  f"{shape.spec.template_fingerprint}")  # fmt: skip
    found = list(problems(context))
    for problem in found:
        yield Finding("settings", "problem", problem.what, problem.hint)
    if not found:
        yield Finding("settings", "ok", "every stage would accept them")
