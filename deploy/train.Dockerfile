# A training node with CUDA torch, as a base for your own image. From the root of the clone:
#   docker build --file deploy/train.Dockerfile --tag REGISTRY/precache-train:0.1.0 .
# To train from a bucket, or to decompress on the GPU: --build-arg EXTRAS=gcs,nvcomp
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=
# In the environment, so that it also constrains pip's build environments.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY precache precache
COPY workers workers
# A compiler for precache's C code, without which reading takes up to twice the CPU time.
# Any version that the base's Debian has will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/precache \
    && /opt/precache/bin/pip install ".${EXTRAS:+[$EXTRAS]}"

FROM ${BASE}
COPY --from=build /opt/precache /opt/precache
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin precache
# The wheels of torch carry CUDA; the driver comes from the node, by way of NVIDIA's container runtime.
ENV PATH=/opt/precache/bin:$PATH PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/precache
CMD ["python", "-c", "import precache, torch; print(precache.__version__, torch.cuda.is_available())"]
