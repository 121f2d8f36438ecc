"""What the documentation shows works, and the tests that it names exist."""

import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
#: A block of Python, and whether the page says that it is a fragment.
BLOCK = re.compile(r"(<!-- a fragment -->\n+)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED_TEST = re.compile(r"`(tests/\w+\.py)::(test_\w+)`")


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_the_python_of_a_how_to_page_runs(
    page: Path, workflows: ModuleType, isolated_registry: object
) -> None:
    """All its blocks in order, in one namespace, as a module of the app orders would."""
    namespace: dict[str, object] = {"__name__": "testproject.orders.how_to"}

    for block in BLOCK.finditer(text := page.read_text()):
        if not block[1]:
            lines_before = text.count("\n", 0, block.start(2))
            code = compile("\n" * lines_before + block[2], str(page), "exec")
            exec(code, namespace)  # noqa: S102

    assert "assert " in text, "a page that asserts nothing shows nothing"


def test_few_blocks_of_the_how_to_pages_are_fragments() -> None:
    fragments = [page.name for page in HOW_TO if "<!-- a fragment -->" in page.read_text()]

    assert len(fragments) <= 2


def test_every_test_named_in_the_documentation_exists() -> None:
    named = {
        (page.name, *match)
        for page in (ROOT / "docs").rglob("*.md")
        for match in NAMED_TEST.findall(page.read_text())
    }

    missing = [
        (page, f"{path}::{test}")
        for page, path, test in sorted(named)
        if not (ROOT / path).exists() or f"def {test}(" not in (ROOT / path).read_text()
    ]

    assert missing == []
    assert len(named) >= 10


def test_every_line_of_the_reference_system_page_names_its_test() -> None:
    page = (ROOT / "docs" / "reference-system.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and "Proven by" not in row]

    assert len(rows) >= 15
    assert [row for row in rows if not NAMED_TEST.search(row)] == []


def test_the_links_of_the_documentation_lead_somewhere() -> None:
    broken = [
        (page.relative_to(ROOT).as_posix(), target)
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]

    assert broken == []
