"""The template of a target is the one that its server renders with, wherever the folder is."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import UserError
from eyas.targets import remote
from eyas.targets.remote import describe_url
from eyas.targets.tokenizer import fingerprint_template, read_tokenizer
from tiny import CHAT_TEMPLATE, make_tokenizer

PROCESSORS = CHAT_TEMPLATE + "{# of the processor #}"
WITH_TOOLS = CHAT_TEMPLATE + "{{ tools | tojson }}"


def _folder(folder: Path, template: Any, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    make_tokenizer(template).save_pretrained(folder)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_template_that_only_the_processor_has_is_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path, None, chat_template={"chat_template": PROCESSORS})
    assert read_tokenizer(folder).chat_template == PROCESSORS
    other = _folder(tmp_path / "b", None, processor_config={"chat_template": PROCESSORS})
    assert read_tokenizer(other).chat_template == PROCESSORS


def test_a_processors_template_goes_before_the_tokenizers_but_not_with_tools(tmp_path: Path) -> None:
    files = {"chat_template": {"chat_template": PROCESSORS}, "preprocessor_config": {}}
    tokenizer = read_tokenizer(_folder(tmp_path, CHAT_TEMPLATE, **files))
    assert tokenizer.get_chat_template() == PROCESSORS
    assert tokenizer.get_chat_template(tools=[{}]) == CHAT_TEMPLATE


def test_without_a_processor_its_template_is_not_used(tmp_path: Path) -> None:
    folder = _folder(tmp_path, CHAT_TEMPLATE, chat_template={"chat_template": PROCESSORS})
    assert read_tokenizer(folder).chat_template == CHAT_TEMPLATE


def test_a_processor_that_transformers_refuses_has_no_say(tmp_path: Path) -> None:
    files = {"chat_template": {"chat_template": PROCESSORS}, "preprocessor_config": {}}
    named = {"default": CHAT_TEMPLATE, "tool_use": WITH_TOOLS}
    assert read_tokenizer(_folder(tmp_path, named, **files)).chat_template == named


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"chat_template": 3}'])
def test_a_chat_template_file_without_a_template_is_refused(text: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, None)
    (folder / "chat_template.json").write_text(text)
    with pytest.raises(UserError, match=r"chat_template|no chat template"):
        read_tokenizer(folder)


def test_templates_behind_a_url_are_those_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "cache_folder", lambda: tmp_path / "cache")
    named = {"default": CHAT_TEMPLATE, "tool_use": WITH_TOOLS, "of_ours": "x"}
    folder = _folder(tmp_path / "model", named, config={}, processor_config={"chat_template": PROCESSORS})
    here = read_tokenizer(folder).chat_template
    there = read_tokenizer(describe_url(f"file://{folder}")).chat_template
    assert there == here == {**named, "default": PROCESSORS}
    assert fingerprint_template(there) == fingerprint_template(dict(reversed(here.items())))
    assert fingerprint_template(here) != fingerprint_template({**here, "tool_use": "y"})
