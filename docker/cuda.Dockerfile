# An image for NVIDIA GPUs. In the repository root: docker build -f docker/cuda.Dockerfile -t mindspeed-mm:cuda .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# The builds of PyPI bring CUDA; for a driver that is too old for them, name the index of an older CUDA (pytorch.org).
ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=diffusion,serve,lowbit,cuda

# g++: Triton and torch.compile build their kernels with it.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mindspeed-mm
COPY constraints.txt ./
RUN python3 -m pip install --no-cache-dir torch torchvision --extra-index-url "${TORCH_INDEX}" -c constraints.txt
COPY pyproject.toml README.md LICENSE NOTICE CHANGELOG.md ./
COPY mindspeed_mm mindspeed_mm
RUN python3 -m pip install --no-cache-dir ".[${EXTRAS}]" -c constraints.txt

# Any user may be chosen with --user: the home folder is open, and USER is what libraries ask for the name of a cache.
RUN useradd --create-home --uid 1000 --non-unique mm && chmod 1777 /home/mm
# What the NVIDIA Container Toolkit brings in with --gpus: the driver's libraries and nvidia-smi.
ENV HOME=/home/mm USER=mm NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
USER mm
WORKDIR /workspace
ENTRYPOINT ["mm"]
CMD ["--help"]
