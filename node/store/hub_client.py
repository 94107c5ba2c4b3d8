"""The client of the hub, and what goes wrong between here and there, in words.

It goes through the proxies of the environment, as nothing else in exo-node does.
"""

import os
from typing import Any, Final

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ...placement.errors import DownloadFailed
from ..machine.setting_sources import environment

_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_FILES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")


def hub_client(**options: Any) -> httpx2.Client:
    """The hub's client goes through the proxies of the environment. Raises DownloadFailed."""
    try:
        return httpx2.Client(follow_redirects=True, **options)
    except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
        environ = environment()
        names = [name for name in environ if name.upper() in _PROXIES]
        why = "it is malformed"
        if isinstance(error, OSError):
            names = [n for n in _FILES if n in environ and not os.path.exists(environ[n])]
            why = "there is no such file"
        elif isinstance(error, ImportError):
            why = "SOCKS is not supported"
        raise DownloadFailed(
            f"{' or '.join(sorted(names))} cannot be used: {why}. Write a proxy as "
            "http://HOST:PORT, or unset the variable.",
            param=sorted(names)[0] if names else None,
        ) from error


def wrong_answer(about: str, fault: str) -> DownloadFailed:
    return DownloadFailed(
        f"the hub's answer about {about} has the wrong form ({fault}). Check that HF_ENDPOINT, or "
        "a proxy between here and there, leads to a Hugging Face hub.",
        param="HF_ENDPOINT",
    )


def explain(error: Exception, repository: str, revision: str | None) -> str:
    """The fault between here and the hub, and its remedy."""
    match error:
        case GatedRepoError():
            return (
                f"{repository} is gated. Accept its terms on its page at the hub, then log in with "
                "`hf auth login` or set HF_TOKEN."
            )
        case RepositoryNotFoundError():
            return (
                f"the hub has no model repository {repository}, or it is private. Check the name; "
                "for a private one log in with `hf auth login` or set HF_TOKEN."
            )
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision or 'main'}. Check it on the hub."
        case DisabledRepoError():
            return f"the hub has disabled {repository}. Choose another repository."
        case HfHubHTTPError():
            status = error.response.status_code
            return f"the hub answered {status} for {repository}. Try again later."
        case httpx2.HTTPError():
            return (
                f"the hub could not be reached for {repository} ({error.__cause__ or error}). "
                "Check the network, HF_ENDPOINT and the proxy's variables, and start the download "
                "again; it resumes where it stopped."
            )
        case _:
            return (
                f"{repository} could not be written to {constants.HF_HUB_CACHE} ({error}). Check "
                "its disk and permissions, or set HF_HUB_CACHE to another folder."
            )
