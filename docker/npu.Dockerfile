# An image for Ascend NPUs. In the repository root: docker build -f docker/npu.Dockerfile -t mindspeed-mm:npu .
# 910b: Atlas A2; for Atlas A3 write a3. CANN 9.1.0 is the one of torch_npu 2.11 (table of TorchNPU's releases), so the
# floor set is the default; another pair takes both arguments, CANN and CONSTRAINTS.
ARG CANN=9.1.0-910b-ubuntu22.04-py3.12
FROM quay.io/ascend/cann:${CANN}

# torch_npu replaces the device of the CPU builds. On Arm, PyPI's builds are CPU builds already.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG CONSTRAINTS=constraints-floor.txt
ARG EXTRAS=diffusion,serve

# g++: torch.compile builds its kernels with it.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/mindspeed-mm
COPY ${CONSTRAINTS} constraints.txt
RUN python3 -m pip install --no-cache-dir torch torchvision --extra-index-url "${TORCH_INDEX}" -c constraints.txt
RUN python3 -m pip install --no-cache-dir "torch_npu==$(sed -n 's/^torch==//p' constraints.txt).*" -c constraints.txt
COPY pyproject.toml README.md LICENSE NOTICE CHANGELOG.md ./
COPY mindspeed_mm mindspeed_mm
RUN python3 -m pip install --no-cache-dir ".[${EXTRAS}]" -c constraints.txt

# Any user may be chosen with --user: the home folder is open, and USER is what libraries ask for the name of a cache.
RUN useradd --create-home --uid 1000 --non-unique mm && chmod 1777 /home/mm
# The driver's libraries come from the host, see docs/docker.md.
ENV HOME=/home/mm USER=mm \
    LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/common:/usr/local/Ascend/driver/lib64/driver:${LD_LIBRARY_PATH}
USER mm
WORKDIR /workspace
ENTRYPOINT ["/bin/bash", "-c", "for each in ascend-toolkit cann; do if [ -f /usr/local/Ascend/$each/set_env.sh ]; then . /usr/local/Ascend/$each/set_env.sh; break; fi; done; exec mm \"$@\"", "mm"]
CMD ["--help"]
