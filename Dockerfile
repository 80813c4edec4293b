# Images of kvbus. The agents and the command `kvbus` are in one image:
#
#   docker build --tag kvbus .
#   docker run --rm kvbus kvbus doctor
#   docker run --env KVBUS_AGENT_ID=… kvbus kvbus-prefill        # or kvbus-decode
#
# BASE is any image with Python 3.11 or later and its venv module; a slim one suffices for GPUs, too. The SDK in the
# package requires torch. To save gigabytes, name an index of torch's CPU builds: --build-arg TORCH_INDEX=https://…
#
# An engine imports kvbus in its own process, and needs the same version of kvbus as its agent:
#
#   docker build --target engine --tag vllm-kvbus .
#
# ENGINE defaults to the version of vLLM that is tested. To use another image, set --build-arg ENGINE=….
ARG BASE=python:3.11-slim-bookworm
ARG ENGINE=vllm/vllm-openai:v0.32.0

# The full Python image has a C compiler, which the copy kernel needs.
FROM python:3.11-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${ENGINE} AS engine
# No constraints: packages that vLLM has already keep their versions.
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
# Run the engine's containers with this uid, too: an agent accepts only engines of its own user.
USER 10001:10001
WORKDIR /tmp
CMD ["kvbus", "doctor"]
