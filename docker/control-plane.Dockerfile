# syntax=docker/dockerfile:1
# The control plane: no torch, no model. From the root of the repository:
#   docker build -f docker/control-plane.Dockerfile -t maniple/control-plane .
# Pin what it stands on:  --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY control_plane control_plane
COPY worker_service worker_service
COPY service_chassis service_chassis
COPY gen gen
COPY kernels kernels
COPY clients/python clients/python
# packages.txt says what is in the image, to scanners and to people.
RUN python -m venv /opt/maniple \
    && /opt/maniple/bin/pip install ".[auth,kserve,observability]" \
    && /opt/maniple/bin/pip freeze --all > /opt/maniple/packages.txt

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Maniple control plane" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/maniple /opt/maniple
ENV PATH=/opt/maniple/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
# A number, so that Kubernetes can see that it is not root. Nothing is written but /tmp.
USER 10001:10001
EXPOSE 50051 50053 9090
# The process itself, no shell: it gets SIGTERM and drains.
ENTRYPOINT ["/opt/maniple/bin/maniple"]
CMD ["control-plane", "--help"]
