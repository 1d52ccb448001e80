# Penstock with everything it needs, for machines with an NVIDIA driver or without:
#   docker build -t penstock:cuda .
#   docker build -t penstock:cpu --build-arg FLAVOR=cpu .
#   docker run --gpus all --shm-size 16g penstock:cuda penstock doctor
# The CUDA libraries come with torch; the driver is that of the host (NVIDIA container toolkit).
FROM python:3.11-slim-bookworm
ARG FLAVOR=cuda
ARG PIP_ARGS=--no-cache-dir

# Triton and torch.compile call a C++ compiler at run time. KubeRay probes with wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential wget \
    && rm -rf /var/lib/apt/lists/*

# The group of the volume in a KubeRay manifest of `penstock launch` is 1000.
RUN useradd --create-home --uid 1000 penstock
WORKDIR /opt/penstock
RUN chown penstock:penstock .
USER penstock

COPY --chown=penstock:penstock . .
# A machine that builds images need not have a driver.
RUN make setup FLAVOR=${FLAVOR} HAS_DRIVER=yes EXTRAS=envs PIP_ARGS="${PIP_ARGS}"
ENV PATH=/opt/penstock/.venv/bin:${PATH}
# KubeRay starts Ray in a login shell, which sets another PATH.
USER root
RUN ln -s /opt/penstock/.venv/bin/penstock /opt/penstock/.venv/bin/ray /usr/local/bin/
USER penstock

WORKDIR /home/penstock
CMD ["penstock", "doctor"]
