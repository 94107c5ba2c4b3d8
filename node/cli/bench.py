"""`exo-node bench`: models and servers are measured by the extra `bench`."""

from typing import Any, Final

from ...placement.errors import InvalidSettings
from .flags import group

_INSTALL: Final = "`pip install 'exo-node[bench]'`, or in a checkout `pip install ./bench`, adds it"

bench = group("Measure models on this machine, and servers under load.")


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
