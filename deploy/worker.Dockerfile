# What builds stores: a node of a Ray cluster, or a machine of its own. From the root of the clone:
#   docker build --file deploy/worker.Dockerfile --tag REGISTRY/precache-worker:0.1.0 .
# To pin the base by its digest as well: --build-arg BASE=python:3.11.14-slim-bookworm@sha256:…
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# By the environment, so that it also holds for what pip builds a package with.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# torch without CUDA, and nothing else from that index: no name there can shadow one of PyPI's.
RUN python3 -m venv /opt/precache \
    && /opt/precache/bin/pip install --no-deps --index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY precache precache
COPY workers workers
# ray[default] has the dashboard, through which jobs are submitted and Kubernetes asks for health.
RUN /opt/precache/bin/pip install ".[workers,gcs,s3,azure]" "ray[default]"

FROM ${BASE}
COPY --from=build /opt/precache /opt/precache
# KubeRay starts Ray in a login shell, which sets PATH anew.
RUN echo "PATH=/opt/precache/bin:\$PATH" > /etc/profile.d/precache.sh \
    && useradd --uid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin precache
ENV PATH=/opt/precache/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
CMD ["precache", "--help"]
