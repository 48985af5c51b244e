"""The docs do what they say, and what is generated in them is current."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from eyas.cli import cli
from eyas.config.explain import to_markdown
from pipeline import eyas, write_prompts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def test_the_quickstart_works_as_it_stands(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of the page in its order, with a tiny target under the demo's name."""
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert len(commands) >= 7
    target = tmp_path / "smollm2-135m-instruct"
    target.symlink_to(tiny_target)
    write_prompts(tmp_path / "prompts.jsonl", 40)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = shlex.split(command.replace("demo:smollm2-135m-instruct", str(target)))
        assert words[0] == "eyas"
        screen = eyas(*words[1:])
        assert screen.code == 0, f"{command}\n{screen.err}"
        if words[1] == "init":
            # Tiny answers hold few tokens.
            path = tmp_path / "run.yaml"
            small = yaml.safe_load(path.read_text())
            small["evaluate"] |= {"num_prompts": 2, "max_new_tokens": 12}
            small["regenerate"]["max_new_tokens"] = 16
            small["train"]["num_epochs"] = 1
            path.write_text(yaml.safe_dump(small))
    assert (tmp_path / "runs/smollm2-135m-instruct/draft/README.md").is_file()
    assert (tmp_path / "compared.html").is_file()


def test_the_configuration_reference_is_current() -> None:
    page = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert page == to_markdown(), "eyas config --markdown > docs/reference/configuration.md"


def test_the_command_reference_is_current() -> None:
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    now = runpy.run_path(str(DOCS / "reference" / "make_commands.py"))["page"]()
    assert page == now, "python docs/reference/make_commands.py > docs/reference/commands.md"


def test_the_picture_of_rows_is_drawn_from_the_row_plan() -> None:
    draw = runpy.run_path(str(DOCS / "pictures" / "make_rows.py"))["draw"]
    assert (DOCS / "pictures" / "rows.svg").read_text(encoding="utf-8") == draw()


def test_every_page_is_in_the_navigation() -> None:
    def leaves(value: object) -> list[str]:
        if isinstance(value, str):
            return [value]
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in leaves(part)]  # type: ignore[attr-defined]

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(leaves(nav)) == [str(p.relative_to(DOCS)) for p in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M))
    named = set(re.findall(r"^ *eyas ([a-z-]+)", shown, re.M)) | set(re.findall(r"`eyas ([a-z-]+)", text))
    named |= set(re.findall(r"^ {4}eyas ([a-z-]+)", text, re.M))
    assert named <= set(cli.commands)


def test_exit_codes_are_documented_where_people_look() -> None:
    help_text = " ".join(eyas("--help").out.split())
    for code in ("0 done", "1 something failed", "2 the command", "130 interrupted"):
        assert code in help_text
