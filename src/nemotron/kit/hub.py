"""What to say when the Hugging Face Hub does not give what was asked for."""

from __future__ import annotations

from nemo_runspec.errors import first_line


def what_failed(error: Exception) -> str:
    """What the client says, short: its own messages are paragraphs that hold whole addresses."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, ValueError):  # HFValidationError: what is wrong with the name
        return first_line(error)
    away = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub was not reached"
    if isinstance(error, LocalEntryNotFoundError):  # the client looked in its cache when no answer came
        return f"{away}, and it is not in the cache"
    if constants.HF_HUB_OFFLINE:
        return away
    if isinstance(error, GatedRepoError):
        return "access denied: it is gated"
    if isinstance(error, HfHubHTTPError):
        return f"the Hub answered {error.response.status_code}"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError | TimeoutError):
        return error.strerror  # of this machine's disk
    return f"{away} ({getattr(error, 'strerror', None) or type(error).__name__})"


def download_hint(repo: str) -> str:
    """What helps where a model or its tokenizer could not be had: to bring it here by other means, or to log in."""
    return (
        f"where it can be reached: hf download {repo}, and give its folder here; private and gated models "
        "need hf auth login, or HF_TOKEN"
    )
