"""Opens URLs, and follows no redirect: a header that has a token goes only where it was to go."""

import urllib.request


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """None: the answer is the redirect."""


def opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """With urllib's other handlers, and ``handlers``; a redirect is an `HTTPError`."""
    return urllib.request.build_opener(_NoRedirects, *handlers)
