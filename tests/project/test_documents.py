"""Files, commands, flags, variables, endpoints and fields in the documents exist."""

import ast
import dataclasses
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import typer.main
from fake_files import FakeFiles
from fakes import FakeChat, FakeOperations
from http_node import no_files
from starlette.applications import Starlette
from starlette.routing import Route
from typer.core import TyperGroup

from exo_node.mtp.types import GenerationStats
from exo_node.node.api.http import errors
from exo_node.node.api.http.guard import Access, Guard
from exo_node.node.api.openai.openai_schema import ChatBody
from exo_node.node.api.server import Services, build_app
from exo_node.node.api.shared.profile_file import ProfileFile
from exo_node.node.chat.metrics import Metrics
from exo_node.node.chat.scrape import NodeState
from exo_node.node.chat.totals import Totals
from exo_node.node.cli.main import COMMANDS, app, load_command
from exo_node.node.join.joining import Joining
from exo_node.node.join.operations import JoinOperations
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.settings import SOURCES
from exo_node.node.machine.timing import LOCAL
from exo_node.node.trust.local_token import LocalToken
from exo_node.placement.library import packaged_cards, parse_card

ROOT = Path(__file__).parents[2]
PAGES = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
DECISIONS = sorted(
    f"docs/decisions/{page.name}"
    for page in (ROOT / "docs" / "decisions").glob("*.md")
    if page.name != "README.md"
)
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/README.md",
    "docs/decisions/README.md",
    "tests/README.md",
    *DECISIONS,
    *PAGES,
)
FOLDERS = ("node", "placement", "proto", "shard", "mtp", "dashboard")

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(
    r"\.?[\w-]+(?:/[\w.*-]+)*(?:/|\.(?:py|md|toml|txt|json|yml|proto|js|html))"
    r"|Makefile|\.(?:ci|github|links)/\S*"
)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def spans(text: str) -> list[str]:
    """Inline code; fenced blocks are not inline."""
    return _SPAN.findall(_FENCE.sub("", text))


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in _FENCE.findall(text) if name == language]


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the tables under a second-level heading, without their header lines."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"there is no section {heading!r}"
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        row for row, after in zip(cells, [*cells[1:], [""]], strict=True) if not _rule(row, after)
    ]


def _rule(*lines: list[str]) -> bool:
    """Whether one of the lines is the rule below a header: then the first is header or rule."""
    return any(cell.startswith("---") for line in lines for cell in line)


# ------------------------------------------------------------------------------- files


def test_a_path_in_code_marks_exists() -> None:
    # In a model's folder, and what a bench writes.
    outputs = {"mtp.json", "mtp-bench/", "serve-bench/", "serve.json", "serve.csv", "index.html"}
    outputs |= {"1_Pooling/config.json", "modules.json", "sentence_bert_config.json"}
    outputs |= {f"{name}.json" for name in ("chat_template", "processor_config", "tokenizer")}
    outputs |= {"additional_chat_templates", "generation_config.json", "tokenizer_config.json"}
    for_a_user = {"profiles.toml", "exo-card.toml", "config.json", "Owner--Name.toml", *outputs}
    named = {
        (span, document)
        for document in DOCUMENTS
        for span in spans(text_of(document))
        if _PATH.fullmatch(span) and span not in for_a_user
    }
    assert [name for name in named if not any(ROOT.glob(name[0].rstrip("/")))] == []


def test_a_link_leads_to_a_file_and_its_heading() -> None:
    for document in DOCUMENTS:
        for link, anchor in _LINK.findall(text_of(document)):
            if "://" in link:
                continue
            target = (ROOT / document).parent / link if link else ROOT / document
            assert target.exists(), f"{document}: {link}"
            if anchor:
                assert anchor in _anchors(target), f"{document}: {link}#{anchor}"


@cache
def _anchors(page: Path) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= 150, "move details to a page in docs/"
    linked = {link for link, _ in _LINK.findall(text)}
    assert sorted({*PAGES} - linked) == []


def test_the_index_of_decisions_is_complete() -> None:
    linked = {link for link, _ in _LINK.findall(text_of("docs/decisions/README.md"))}
    assert {Path(page).name for page in DECISIONS} <= linked


ROOMS = sorted(
    path.parent
    for folder in (*FOLDERS, "bench/exo_node_bench")
    for path in (ROOT / folder).rglob("__init__.py")
    if path.parent.relative_to(ROOT).parts[:2] != ("shard", "models")
)


def test_the_architecture_names_every_room() -> None:
    named = {span.rstrip("/") for span in spans(text_of("ARCHITECTURE.md"))}
    rooms = {room.relative_to(ROOT).as_posix() for room in ROOMS}
    assert sorted(rooms - named) == [], "give each its line in ARCHITECTURE.md"


def test_a_room_says_what_its_files_are() -> None:
    """Each of them, in order, in the docstring of its package."""
    for room in ROOMS:
        docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        listed = re.findall(r"^(\w+\.py): \S", docstring, re.MULTILINE)
        files = (path.name for path in room.glob("*.py") if "_pb2" not in path.name)
        assert listed == sorted({*files} - {"__init__.py"}), room


def test_no_tracked_text_names_a_place_on_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so nothing says which files belong to it")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    place = re.compile(rb"(?<![\w.~}$)-])/(?:work|root|home|Users)/[\w.]")
    files = [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    texts = {file: file.read_bytes() for file in files if file.suffix != ".safetensors"}
    assert place.search(b"in /" + b"work/main") is not None
    assert [file.name for file, content in texts.items() if place.search(content)] == []


# ---------------------------------------------------------------------------- commands


@cache
def _commands() -> dict[str, set[str]]:
    """The CLI's commands and the options of each."""
    root = typer.main.get_command(app)
    options = {"": {option for each in root.params for option in each.opts}}
    for name in COMMANDS:
        command = load_command(name)
        nested = command.commands.values() if isinstance(command, TyperGroup) else ()
        options[name] = {o for c in (command, *nested) for each in c.params for o in each.opts}
    return options


@cache
def _code() -> list[str]:
    """The lines of all documents' shell blocks, continued ones joined, and inline code."""
    lines: list[str] = []
    for text in map(text_of, DOCUMENTS):
        shell = "".join(blocks(text, "sh")).replace("\\\n", " ")
        lines += [line.partition(" # ")[0] for line in shell.splitlines()] + spans(text)
    return lines


def test_a_command_exists_with_its_options() -> None:
    commands = _commands()
    for line in _code():
        for words in re.findall(r"(?:^|[/ ])exo-node((?: [^ ]+)+)", line):
            [name, *rest] = words.partition(" -- ")[0].split()  # the rest is another program's
            options = {word for word in rest if re.fullmatch(r"--[a-z-]+", word)}
            if name.startswith("-"):
                assert name in commands[""], line
            else:
                assert name in commands, line
                assert options <= commands[name], line


def test_a_make_target_and_a_script_exist() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", text_of("Makefile"), re.MULTILINE)
    assert phony is not None
    for line in _code():
        for target in re.findall(r"^make ([a-z]+)", line):
            assert target in phony[1].split(), line
        for script in re.findall(r"python ((?:bench|proto)/\S+)", line):
            assert (ROOT / script).is_file(), line


def test_operations_list_every_command() -> None:
    table = [cells[0] for cells in rows(text_of("docs/operations.md"), "Commands")]
    listed = {cell.strip("`").split()[1] for cell in table if cell.startswith("`exo-node ")}
    assert listed == _commands().keys() - {""}


# ------------------------------------------------------------------- the pages' tables


def test_settings_list_every_flag_and_variable() -> None:
    listed = {
        (cells[1].strip("`"), cells[0].strip("`") or None)
        for cells in rows(text_of("docs/settings.md"), "Flags and variables")
    }
    sources = SOURCES.values()
    assert listed == {(source.variable, source.flag) for source in sources}


def test_every_variable_that_a_document_names_is_read() -> None:
    sources = SOURCES.values()
    named = {name for d in DOCUMENTS for name in re.findall(r"\bEXO_[A-Z_]*[A-Z]", text_of(d))}
    assert sorted(named - {source.variable for source in sources}) == []


def test_the_api_page_lists_every_endpoint() -> None:
    table = rows(text_of("docs/api.md"), "Endpoints")
    listed = {cells[0].strip("`"): cells[1] for cells in table}
    assert {state for state in listed.values()} <= {"yes", "no"}
    joining, token = JoinOperations(cast(Joining, None)), LocalToken("token")
    services = Services(FakeChat(), FakeOperations(), EventLog(), joining, files=FakeFiles())
    guard = build_app(services, no_files, LOCAL, Access(token=token))
    assert isinstance(guard, Guard)
    assert isinstance(guard.app, Starlette)
    served = {
        f"{method} {re.sub(':[a-z]+}', '}', route.path)}"
        for route in guard.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {name for name, state in listed.items() if state == "yes"} == served
    assert not served & {name for name, state in listed.items() if state == "no"}


@pytest.mark.parametrize(
    ("page", "heading", "fields"),
    [
        ("docs/api.md", "Chat requests", lambda: set(ChatBody.known_fields())),
        (
            "docs/mtp.md",
            "Statistics of an answer",
            lambda: (
                {field.name for field in dataclasses.fields(GenerationStats)}
                - {"prompt_tokens", "completion_tokens"}
            ),
        ),
    ],
    ids=["of a chat request", "of the final stats"],
)
def test_a_page_names_every_field(page: str, heading: str, fields: Callable[[], set[str]]) -> None:
    section = text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert sorted(fields() - set(spans(section))) == []


def test_a_code_in_the_api_pages_table_of_errors_has_its_status() -> None:
    statuses = {kind.code: str(status) for kind, (status, *_) in errors.KINDS.items()}
    table = rows(text_of("docs/api.md"), "Errors")
    listed = {code: cells[0] for cells in table for code in spans(cells[1])}
    assert statuses.items() <= listed.items()
    code_text = _code_text()
    assert sorted(code for code in listed if f'"{code}"' not in code_text) == []


def test_the_metrics_page_lists_every_metric() -> None:
    text = Metrics(Totals()).render(NodeState("1", {}, {}, [], {})).decode()
    metrics = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    table = text_of("docs/metrics.md")
    listed = {span for line in table.splitlines() if line.startswith("| `") for span in spans(line)}
    assert {name for name in listed if name.startswith(("vllm:", "exo_node_"))} == metrics


def test_an_error_that_operations_explain_is_one_that_the_code_has() -> None:
    code_text = _code_text()
    table = rows(text_of("docs/operations.md"), "Troubleshooting")
    assert len(table) > 10
    for cells in table:
        for part in "…".join(spans(cells[0])).split("…"):
            assert part.strip() in code_text, cells[0]


@cache
def _code_text() -> str:
    """The code of the node and its libraries; texts that go on in the next line are joined."""
    text = "".join(file.read_text() for room in ROOMS for file in room.glob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_the_models_pages_card_is_a_card() -> None:
    card, drafter, _ = [tomllib.loads(b) for b in blocks(text_of("docs/models.md"), "toml")]
    facts = packaged_cards().popitem()[1].model_dump(exclude={"native_mtp", "sampling"})
    parsed = parse_card({**facts, **card, **drafter}, "docs/models.md")
    assert parsed.native_mtp is not None and parsed.drafter is not None
    assert parsed.native_mtp.default_k <= parsed.native_mtp.max_k


def test_the_models_pages_profiles_are_profiles(tmp_path: Path) -> None:
    *_, text = blocks(text_of("docs/models.md"), "toml")
    path = tmp_path / "profiles.toml"
    _ = path.write_text(text)
    profiles = ProfileFile(path)
    assert (list(profiles.all()), profiles.faults()) == (["gpt-4o", "coder"], {})


# ------------------------------------------------------------------------------- names

TO_WORK_BY = ("ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md")
_FROM_FILE = re.compile(r"`([\w/]+\.py)`(?:: | \(| \| )((?:`\w+`(?:, )?)+)")
_MEMBER = re.compile(r"`(?=[A-Z]+[a-z]|\w+\.[A-Z]+[a-z])(\w+)\.(\w+)[`(]")
_DEFINITION = re.compile(r"^ *(?:class|def|async def|message|rpc) (\w+)", re.MULTILINE)
_OF_OTHERS = {"Dense", "Makefile", "Normalize", "OpenAIChatCompletionClient", "ToolSearch"}


@cache
def _sources() -> dict[str, str]:
    files = [file for room in (*FOLDERS, "bench", "tests") for file in (ROOT / room).rglob("*.py")]
    files += (ROOT / "proto").glob("*.proto")
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def test_a_class_or_a_function_in_code_marks_exists() -> None:
    text = "\n".join(map(text_of, (*TO_WORK_BY, *PAGES)))
    defined = {name for source in _sources().values() for name in _DEFINITION.findall(source)}
    named = set(re.findall(r"`([A-Z]+[a-z]\w*(?=`)|[a-z_]+(?=\([^`]*\)))", text)) - _OF_OTHERS
    assert sorted(named - defined) == []
    for path, names in _FROM_FILE.findall(text):
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(?:\w+ )*{name}\b", _sources()[path], re.MULTILINE), (path, name)


def test_a_member_that_our_code_or_a_document_names_exists() -> None:
    owners: dict[str, str] = {}
    for path, source in _sources().items():
        for owner in (Path(path).stem, *re.findall(r"^class (\w+)", source, re.MULTILINE)):
            owners[owner] = owners.get(owner, "") + source
    for path, text in {**_sources(), **{name: text_of(name) for name in DOCUMENTS}}.items():
        named = [name for name in _MEMBER.findall(text) if name[0] in owners]
        missing = [name for name in named if not re.search(rf"\b{name[1]}\b", owners[name[0]])]
        assert missing == [], path
