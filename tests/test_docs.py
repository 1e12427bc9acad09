"""The documents agree with the code, and with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_state_tables_are_those_of_the_code():
    """`make docs` prints them anew."""
    printed = subprocess.run(
        [sys.executable, ROOT / "tools" / "print_states.py"], capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs" / "states.md").read_text(encoding="utf-8") == printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    """Relative links name files of this tree."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_readme_names_only_commands_that_exist():
    """Targets of make and subcommands of headrace."""
    from headrace.cli.main import make_parser

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", text)) <= targets
    usage = make_parser().format_help()
    for command in re.findall(r"headrace (serve|router|prefill|decode|layout|demo|sim|top)\b", text):
        assert f"    {command} " in usage, command


def test_architecture_lists_the_rooms_with_the_doors_of_the_test():
    """The table in the document and the one that is enforced."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("## Rooms") :]
    named = set(re.findall(r"`([a-z]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"proto"}
    assert named == rooms
