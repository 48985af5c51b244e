"""Prints commands.md: every command's help, as the command line gives it."""

import click

from eyas.cli import cli


def page() -> str:
    lines = [
        "# Commands",
        "",
        "Generated from the command line by `python docs/reference/make_commands.py`. `eyas completion bash`",
        "(or zsh, fish) prints a script that completes commands and settings.",
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        "| 0 | done |",
        "| 1 | something failed; complete work is kept |",
        "| 2 | the command, the settings or the data are wrong; nothing was changed |",
        "| 130 | interrupted |",
        "",
        "After 1 and 130 the same command goes on.",
    ]
    root = cli.make_context("eyas", [], resilient_parsing=True)
    for name, command in cli.commands.items():
        nested = command.commands if isinstance(command, click.Group) else {}
        for words, one in [(name, command), *((f"{name} {n}", c) for n, c in nested.items())]:
            context = click.Context(one, info_name=words, parent=root, terminal_width=100)
            lines += ["", f"## eyas {words}", "", "```text", one.get_help(context), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
