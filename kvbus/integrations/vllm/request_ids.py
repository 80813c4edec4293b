"""The id by which both agents know a request: the prefill vLLM's own, made shorter if need be.

Routers put host names into ids, and clients what they like; agents take 256 characters.
"""

from hashlib import blake2b

MAX_CHARACTERS = 200
_KEPT_AT_AN_END = 80


def agents_id(request_id: str) -> str:
    """``request_id``, or both of its ends with a digest of all of it between them."""
    if len(request_id) <= MAX_CHARACTERS:
        return request_id
    digest = blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{request_id[:_KEPT_AT_AN_END]}~{digest}~{request_id[-_KEPT_AT_AN_END:]}"
