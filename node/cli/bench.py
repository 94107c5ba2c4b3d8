"""`exo-node bench`: the cluster's measurements; models and servers with the extra `bench`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from ...placement.errors import InvalidSettings
from . import output
from .client import call, connect
from .flags import AsJson, DataDir, LocalPort, group, switch
from .output import Json, table, texts
from .times import TIMES

_PROFILE: Final = "/v1/cluster/profile"
_INSTALL: Final = "`pip install 'exo-node[bench]'`, or in a checkout `pip install ./bench`, adds it"

_Measure = Annotated[bool, switch("Measure every link anew first.", "--measure")]

bench = group("Measure models on this machine, and the cluster.")


def _add_benches() -> None:
    """The commands `mtp` and `serve`; without their package, commands that say what is missing."""
    try:
        from exo_node_bench.mtp.command import mtp
        from exo_node_bench.serve.command import serve
    except ImportError as error:
        fault = "is missing" if error.name == "exo_node_bench" else f"does not fit ({error})"
        _add_refusal("mtp", "Sweep K: speed, acceptance, break-even.", fault)
        _add_refusal("serve", "Measure the node here, or other servers, under load.", fault)
    else:
        _ = bench.command()(mtp), bench.command()(serve)


def _add_refusal(name: str, help: str, fault: str) -> None:
    def refuse() -> None:
        raise InvalidSettings(f"bench {name}: the package exo-node-bench {fault}; {_INSTALL}")

    anything: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
    text = f"{help} With the extra `bench`."
    _ = bench.command(name, help=text, add_help_option=False, context_settings=anything)(refuse)


_add_benches()


@bench.command()
def cluster(
    measure: _Measure = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what the cluster's nodes and links were measured to do.

    A running node is asked. Layers are timed when a node first loads a model, links when a node
    joins and every few minutes while nothing is generated.
    """
    endpoint = connect(port, data_dir)
    profile = call(endpoint, _PROFILE, {} if measure else None, timeout_s=TIMES.measure_s)
    if as_json:
        output.print_json({"profile": profile})
    else:
        print(profile_text(profile, output.terminal_width()))


def profile_text(profile: Json, width: int | None = None) -> str:
    """Nodes, layers of each model, links, and the models that must stay on one node."""
    nodes: Sequence[Json] = profile.get("nodes", [])
    links: Sequence[Json] = profile.get("links", [])
    names = {node["id"]: str(node["name"]) for node in nodes}
    header = ("NODE", "CHIP", "BACKEND", "MEMORY", "BANDWIDTH", "ADDRESSES")
    refusals = {model: why for node in nodes for model, why in node["split_refusals"].items()}
    return output.joined(
        [
            *table(header, map(_node_row, nodes), width=width),
            "",
            *_layer_lines(nodes, width),
            "",
            *_link_lines(links, names, width),
            *(f"{model} runs on one node only: {why}" for model, why in sorted(refusals.items())),
        ]
    )


def _node_row(node: Json) -> tuple[str, ...]:
    bandwidth = node["memory_bandwidth"]
    return (
        *texts(node, "name", "chip", "backend"),
        f"{node['memory_bytes'] / 1e9:.1f} GB",
        f"{bandwidth / 1e9:.0f} GB/s" if bandwidth else "-",
        ", ".join(map(str, node["addresses"])),
    )


def _layer_lines(nodes: Sequence[Json], width: int | None) -> list[str]:
    """A row for each model that a node has measured."""
    rows = sorted(
        (
            str(times["model"]),
            str(node["name"]),
            str(times["dtype"]),
            _ms(times["decode_s"]),
            f"{_ms(times['verify_s'])} ({times['verify_rows']} rows)",
            f"{_ms(times['prefill_s'])} ({times['prefill_rows']} rows)",
            _ms(times["tail_s"]),
        )
        for node in nodes
        for times in node["layers"]
    )
    if not rows:
        return ["no model was timed yet: that happens when a node loads one for the first time"]
    header = ("MODEL", "NODE", "DTYPE", "1 ROW", "VERIFY", "CHUNK", "TAIL")
    note = "ms for one layer; the tail is final norm and lm_head, timed on a generator"
    return [*table(header, rows, width=width), note]


def _link_lines(links: Iterable[Json], names: Mapping[str, str], width: int | None) -> list[str]:
    rows = [
        (
            " - ".join(names.get(node, str(node)) for node in link["nodes"]),
            " - ".join(map(str, link["addresses"])),
            _ms(link["round_trip_min_s"]),
            _ms(link["round_trip_s"]),
            f"{link['bandwidth'] / 1e6:.0f} MB/s" if link["bandwidth"] else "-",
            f"{link['age_s']} s",
            "yes" if link["chosen"] else "",
        )
        for link in links
    ]
    if not rows:
        return [] if len(names) < 2 else ["no link was measured yet: try again in a moment"]
    header = ("LINK", "ADDRESSES", "RTT MIN", "RTT P50", "BANDWIDTH", "AGE", "USED")
    note = "round trips in ms; stages talk over the links that are used"
    return [*table(header, rows, width=width), note]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.3g}"
