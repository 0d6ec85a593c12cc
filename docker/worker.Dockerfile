# syntax=docker/dockerfile:1
# Workers, for CPUs or for NVIDIA devices. From the root of the repository:
#   docker build -f docker/worker.Dockerfile -t maniple/worker .
#   docker build -f docker/worker.Dockerfile -t maniple/worker:0.1.0-cuda --build-arg DEVICE=cuda13 .
# PIP_ARGS goes to pip as it is: for CPUs, an index with builds of torch that bring no CUDA libraries, which are 3 GB.
# Pin what it stands on:  --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# cpu, cuda12 or cuda13: NCCL must be of the CUDA that torch was built for.
ARG DEVICE=cpu
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints-cpu.txt ./
COPY control_plane control_plane
COPY worker_service worker_service
COPY service_chassis service_chassis
COPY gen gen
COPY kernels kernels
COPY clients/python clients/python
RUN python -m venv /opt/maniple \
    && if [ "$DEVICE" = cpu ]; then extras=worker limits="-c constraints-cpu.txt"; else extras="worker,$DEVICE" limits=""; fi \
    && /opt/maniple/bin/pip install $PIP_ARGS $limits ".[$extras,observability,transformers]" \
    && /opt/maniple/bin/pip freeze --all > /opt/maniple/packages.txt

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="Maniple worker" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/maniple /opt/maniple
# Torch finds the driver that the container runtime mounts; all other CUDA libraries came with it.
ENV PATH=/opt/maniple/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50061 50161 50261 9100
ENTRYPOINT ["/opt/maniple/bin/maniple"]
CMD ["worker", "--help"]
