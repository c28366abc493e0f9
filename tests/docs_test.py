"""The documents tell the truth: their code runs, their links lead somewhere,
their list of messages is the sources'.
"""

import ast
import pathlib
import re

import pytest
from processes import run_script

import jax_ep

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "benchmarks/README.md",
    ROOT / "examples/README.md",
    ROOT / "examples/multi_host/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
DIRECTORIES = "jax_ep|cc|xla_ffi|tests|examples|benchmarks|docs|requirements"

on_each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def blocks(path, marker):
    """The fenced blocks of a document that stand below `<!-- marker -->`."""
    pattern = rf"^<!-- {re.escape(marker)} -->\n```\w*\n(.*?)^```$"
    return re.findall(pattern, path.read_text(), re.MULTILINE | re.DOTALL)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize("name", ("README.md", "docs/guide.md", "docs/semantics.md"))
def test_code_runs(name, tmp_path):
    """All blocks of a document, one after the other, print what it says."""
    program = tmp_path / "blocks.py"
    code = blocks(ROOT / name, "runs")
    assert code
    program.write_text("\n".join(code))
    done = run_script("-W", "error", str(program), timeout=250)
    assert done.returncode == 0, done.stderr
    for output in blocks(ROOT / name, "output"):
        assert done.stdout == output


def test_every_public_name_has_an_example():
    code = "\n".join(
        block
        for name in ("docs/guide.md", "docs/semantics.md")
        for block in blocks(ROOT / name, "runs")
    )
    # What others make, users do not call.
    made = {"Flight", "Fp8Rows", "Fp8Weights", "LowLatencyHandle", "MoeStats", "Plan"}
    names = set(jax_ep.__all__) - made
    assert not sorted(n for n in names if not re.search(rf"jax_ep\.{n}\(", code))


def _exists(target, path):
    """Whether a link of the document at `path` leads to a file and a heading."""
    name, _, anchor = target.partition("#")
    file = path.parent / name if name else path
    if not file.exists():
        return False
    headings = (
        re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else ()
    )
    slugs = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    return not anchor or anchor in slugs


@on_each_document
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    gone = {t for t in targets if "://" not in t and not _exists(t, path)}
    assert not sorted(gone)


@on_each_document
def test_paths_exist(path):
    """Those in backquotes; a star stands for several files."""
    named = re.findall(rf"`((?:{DIRECTORIES})/[\w./*-]+)`", path.read_text())
    # Native modules have another suffix on every Python.
    named = {n for n in named if not n.startswith(("jax_ep/_host", "jax_ep/_cuda"))}
    gone = sorted(n for n in named if not any(ROOT.glob(n)))
    assert not gone


def test_the_model_of_several_nodes_is_the_programs():
    page = (ROOT / "docs/scaling.md").read_text()
    table = page.partition("begin -->")[2].partition("<!--")[0].strip()
    done = run_script(str(ROOT / "benchmarks/node_model.py"))
    assert done.stdout.strip() == table


# Messages. Both sides become patterns in which <> stands for what differs.


def documented_messages():
    """What docs/errors.md lists in the first column of its tables."""
    rows = re.findall(r"^\| `(jax_ep.*?)` \|", _errors(), re.MULTILINE)
    return {re.sub(r"<[^<>]*>", "<>", row) for row in rows}


def _errors():
    return (ROOT / "docs/errors.md").read_text()


def python_messages():
    """What the package raises or warns of, {pattern: where}."""
    found = {}
    for path in sorted((ROOT / "jax_ep").rglob("*.py")):
        tree = ast.parse(path.read_text())
        # Names that hold a message's beginning, such as where = "jax_ep.plan".
        known = {
            node.targets[0].id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            if isinstance(node, ast.Raise) or _is_warning(call):
                message = _pattern(call.args[0], known)
                if message:
                    found[message] = f"{path.name}:{node.lineno}"
    return found


def _is_warning(call):
    return getattr(call.func, "attr", "") == "warn"


def _pattern(node, known):
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(value.value)
        else:
            name = getattr(value.value, "id", "")
            parts.append(known.get(name, "<>"))
    return "".join(parts)


def _same(documented, source):
    """Whether a source's pattern may give the documented message."""
    pattern = ".*".join(map(re.escape, source.split("<>")))
    return re.fullmatch(pattern, documented) is not None


def test_every_message_is_documented():
    documented = documented_messages()
    missing = [
        f"{where}: {source}"
        for source, where in python_messages().items()
        if not any(_same(d, source) for d in documented)
    ]
    assert not missing, "docs/errors.md lacks:\n" + "\n".join(missing)


def test_every_documented_message_is_in_the_sources():
    sources = python_messages()
    native = " ".join(
        "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', path.read_text()))
        for directory in ("cc", "xla_ffi")
        for path in sorted((ROOT / directory).rglob("*"))
        if path.suffix in (".cc", ".cu", ".h", ".cuh")
    )
    unknown = []
    for message in sorted(documented_messages()):
        if any(_same(message, source) for source in sources):
            continue
        words = re.findall(r"[A-Za-z][A-Za-z,;' ]{4,}[a-z]", message)
        if not words or not all(w in native for w in words):
            unknown.append(message)
    assert not unknown, "no source has:\n" + "\n".join(unknown)
