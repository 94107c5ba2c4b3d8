"""Sends thousands of requests derived from the OpenAPI document and checks the answers against it.

    python bench/api_fuzz.py [--examples 100] [--seed 0] [--path /api/chat]

schemathesis sends valid and invalid requests of every operation to the real HTTP server over a
scripted chat, without a model. A status of 500, a status or content type that the document does not
have, and an error in another form than the dialect's are faults. Ends with status 1 if there
is one.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzzing import fuzz
from http_node import serving_fakes

from exo_node.node.machine.events import EventLog
from exo_node.node.trust.local_token import LocalToken

DOCUMENT = Path(__file__).parents[1] / "docs" / "openapi.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    _ = parser.add_argument("--examples", type=int, default=100)
    _ = parser.add_argument("--seed", type=int, default=0)
    _ = parser.add_argument("--path", action="append", default=[])
    options = parser.parse_args()
    with serving_fakes(events=EventLog(), token=LocalToken("t")) as node:
        document = cast(dict[str, Any], json.loads(DOCUMENT.read_text()))
        base = f"http://127.0.0.1:{node.port}"
        headers = {"x-exo-token": "t"}
        examples, start = cast(int, options.examples), cast(int, options.seed)
        result = fuzz(document, base, headers, examples=examples, paths=options.path, start=start)
    statuses = dict(sorted(result.statuses.items()))
    print(json.dumps({"requests": result.requests, "statuses": statuses}))
    for fault in sorted(set(result.faults)):
        print(fault)
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
