"""A server of the Model Context Protocol over stdio, with one tool, which writes a file.

Started by coding tools as `python tests/mcp_notes.py`; it answers until its stdin ends.
"""

import json
import sys
from pathlib import Path
from typing import Any

_TEXTS = {"path": {"type": "string"}, "text": {"type": "string"}}
_TOOL = {
    "name": "write_note",
    "description": "Writes a note.",
    "inputSchema": {"type": "object", "properties": _TEXTS, "required": [*_TEXTS]},
}


def _result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a call; None for a method that it does not have."""
    match method:
        case "initialize":
            server = {"name": "notes", "version": "1"}
            version = params["protocolVersion"]
            capabilities = {"tools": dict[str, Any]()}
            return {"protocolVersion": version, "capabilities": capabilities, "serverInfo": server}
        case "tools/list":
            return {"tools": [_TOOL]}
        case "tools/call":
            arguments = params["arguments"]
            _ = Path(arguments["path"]).write_text(arguments["text"])
            return {"content": [{"type": "text", "text": "written"}]}
        case "ping":
            return {}
        case _:
            return None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = _result(request["method"], request.get("params") or {})
        missing = {"error": {"code": -32601, "message": "no such method"}}
        reply = missing if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)


if __name__ == "__main__":
    main()
