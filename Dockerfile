# Images of kvbus. Both agents are in one, and so is the command `kvbus`:
#
#   docker build --tag kvbus .
#   docker run --rm kvbus kvbus doctor
#   docker run --env KVBUS_AGENT_ID=… kvbus kvbus-prefill        # or kvbus-decode
#
# BASE is any image with Python 3.11 or later and its venv module; a slim one does for GPUs as well. Agents use no
# torch, but the SDK in the package does: name an index of torch's CPU builds, which saves gigabytes:
# --build-arg TORCH_INDEX=https://…
#
# An engine imports kvbus in its own process. vLLM with kvbus, of the same version as the agents:
#
#   docker build --target engine --build-arg ENGINE=vllm/vllm-openai:v0.33.0 --tag vllm-kvbus .
ARG BASE=python:3.11-slim-bookworm
ARG ENGINE=vllm/vllm-openai:v0.33.0

# The whole image of Python has a C compiler, which the copy kernel needs.
FROM python:3.11-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${ENGINE} AS engine
# What kvbus requires and vLLM has stays as it is: constraints.txt is of the agents alone.
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    python3 -m pip install --no-cache-dir /wheel/*.whl

FROM ${BASE} AS agent
ARG TORCH_INDEX=""
ENV PATH=/opt/kvbus/bin:$PATH PYTHONUNBUFFERED=1
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    python3 -m venv /opt/kvbus \
    && pip install --no-cache-dir --constraint /constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheel/*.whl)[agent,otel]"
# The engine's containers run with this uid, too: an agent takes engines of its own user only.
USER 10001:10001
WORKDIR /tmp
CMD ["kvbus", "doctor"]
