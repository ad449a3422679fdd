# An image that builds stores, as a node of a Ray cluster or alone. From the root of the clone:
#   docker build --file deploy/worker.Dockerfile --tag REGISTRY/precache-worker:0.1.0 .
# To pin the base by its digest as well: --build-arg BASE=python:3.11.14-slim-bookworm@sha256:…
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# In the environment, so that it also constrains pip's build environments.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# Only torch, without CUDA, from that index, so that no name there can shadow one of PyPI's.
RUN python3 -m venv /opt/precache \
    && /opt/precache/bin/pip install --no-deps --index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY precache precache
COPY workers workers
# ray[default] has the dashboard, which takes jobs and answers the health checks of Kubernetes.
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
