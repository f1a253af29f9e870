"""The limits of a service. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from adt_tree.errors import UserError

MAX_IMAGES = 10  # of one request, as in OpenAI's API
KEY_VARIABLE = "ADT_API_KEY"  # environment variable with the key
CODES_MODEL = "glm_image"  # the model that is served without pixels, by its codes


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Returns the address that a host is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine alone."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def checked_key(key: str | None, source: str) -> str | None:
    """Returns a key without the space around it; None if there is none.

    source: where the key comes from, for the message. Raises UserError if the key is not one word.
    """
    if key is None:
        return None
    if len(key.split()) != 1:
        raise UserError(f"{source}: it must hold one word, the key")
    return key.strip()


@dataclass(frozen=True, slots=True)
class Settings:
    """The limits of a service, and the clients that it accepts."""

    slots: int = 4  # images in flight
    queue: int = 64  # images that wait beyond those in flight; more are answered by 429
    max_prompt_tokens: int = 128  # tokens of the longest prompt; caches are sized for it
    max_body: int = 2**16  # bytes of a request's body
    timeout_s: float = 30.0  # time for the body of a request, and between two requests
    # Every path but /health and the page's needs this key. None: clients of this machine need no key, and
    # others are refused.
    api_key: str | None = None
    server_names: tuple[str, ...] = ()  # names, beside localhost and addresses, by which clients may call
    replica: str = ""  # value of the label `replica` of every metric

    def __post_init__(self) -> None:
        if self.slots < 1 or self.max_prompt_tokens < 1:
            raise UserError(f"slots {self.slots}, max_prompt_tokens {self.max_prompt_tokens}: give 1 or more")
        if self.queue < MAX_IMAGES:
            raise UserError(f"queue {self.queue}: give {MAX_IMAGES} or more, the most of one request")


DEFAULTS = Settings()
