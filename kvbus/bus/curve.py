"""CURVE keys, and what they do to a socket: nobody without the right one gets past the handshake.

Refuses text that is no key, as `ConfigError`. Keys are text everywhere: 40 characters of Z85.
"""

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvbus.errors import ConfigError

KEY_CHARS, KEY_BYTES = 40, 32
HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Who this process is: others are told ``public``, nobody ``secret``."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerCurve:
    """A socket that binds: clients must know its public key, and be let in by a `KeyCheck`."""

    keys: KeyPair
    domain: str
    """What the `KeyCheck` is told of the socket."""

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the options; without a `KeyCheck` in the context nobody is let in."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        socket.set(zmq.ZAP_DOMAIN, self.domain.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))


@dataclass(frozen=True, slots=True)
class ClientCurve:
    """A socket that connects, to a server that has ``server_key`` and to no other."""

    keys: KeyPair
    server_key: str

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the options; raises `ConfigError` when ``server_key`` is no key."""
        require_key(self.server_key)
        socket.set(zmq.CURVE_SERVERKEY, self.server_key.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self.keys.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        socket.set(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))


def new_key_pair() -> KeyPair:
    """A fresh pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def key_pair_of(secret: str) -> KeyPair:
    """The pair of a secret key; raises `ConfigError` when it is no key."""
    require_key(secret)
    return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)


def require_key(text: str) -> None:
    """Raise `ConfigError`, without the text, unless it is a key."""
    try:
        is_key = len(text) == KEY_CHARS and len(z85.decode(text.encode("ascii"))) == KEY_BYTES
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ConfigError("not a key: a character is not of Z85") from error
    if not is_key:
        raise ConfigError(f"not a key: it has {len(text)} characters in place of {KEY_CHARS}")
