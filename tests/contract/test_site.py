"""docs/ as a site: every page is in the navigation, every link leads somewhere, the build has no warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
OUTSIDE = sorted(ROOT.glob("*.md"))
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs make them."""
    text = _CODE.sub("", page.read_text())
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", each) for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", each.strip().lower())) for each in plain}


def test_the_navigation_names_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = [name for each in nav for name in ([each] if isinstance(each, str) else next(iter(each.values())))]
    assert sorted(named) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.name)
def test_every_link_leads_to_a_place_that_exists(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", _CODE.sub("", page.read_text())):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        place = page if not target else page.parent / target
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{target}#{anchor}"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("needs the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "troubleshooting.html").exists()
