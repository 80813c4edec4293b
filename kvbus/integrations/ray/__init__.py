"""Ray Serve's P/D serving with kvbus: an agent beside each replica, and both legs at once.

    from kvbus.integrations.ray import build_pd_openai_app

    app = build_pd_openai_app({"prefill_config": LLMConfig(...), "decode_config": LLMConfig(...)})
    serve.run(app)

Needs ``ray[serve]``, and a vLLM that Ray's LLM library takes. Refuses to be imported without.
"""

from kvbus.integrations.ray.backend import KvbusConnectorBackend
from kvbus.integrations.ray.builder import build_pd_openai_app, register

__all__ = ["KvbusConnectorBackend", "build_pd_openai_app", "register"]
