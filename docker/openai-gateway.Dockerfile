# syntax=docker/dockerfile:1
# OpenAI's HTTP before the control planes: the stock gateway, nothing of ours.
#   docker build -f docker/openai-gateway.Dockerfile -t maniple/openai-gateway .
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ARG SMG="smg>=1.13,<2"
RUN python -m venv /opt/gateway \
    && /opt/gateway/bin/pip install "$SMG" \
    && /opt/gateway/bin/pip freeze --all > /opt/gateway/packages.txt

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="OpenAI gateway for Maniple" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/gateway /opt/gateway
ENV PATH=/opt/gateway/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["/opt/gateway/bin/smg"]
CMD ["--help"]
