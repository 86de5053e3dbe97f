# An image for CPUs. In the repository root: docker build -f docker/cpu.Dockerfile -t mindspeed-mm:cpu .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# The index of CPU builds: without it pip takes the builds for CUDA, which are several GB larger.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=diffusion,serve

# g++: torch.compile builds its kernels with it.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mindspeed-mm
COPY constraints.txt ./
RUN python3 -m pip install --no-cache-dir torch torchvision --extra-index-url "${TORCH_INDEX}" -c constraints.txt
COPY pyproject.toml README.md LICENSE NOTICE CHANGELOG.md ./
COPY mindspeed_mm mindspeed_mm
RUN python3 -m pip install --no-cache-dir ".[${EXTRAS}]" -c constraints.txt

# Any user may be chosen with --user: the home folder is open, and USER is what libraries ask for the name of a cache.
RUN useradd --create-home --uid 1000 --non-unique mm && chmod 1777 /home/mm
ENV HOME=/home/mm USER=mm
USER mm
WORKDIR /workspace
ENTRYPOINT ["mm"]
CMD ["--help"]
