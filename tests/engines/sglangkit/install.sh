#!/usr/bin/env bash
# SGLang 0.5.23 for the tests on a CPU, in a virtual environment of its own.
#
#     tests/engines/sglangkit/install.sh VENV [PYTHON]
#
# SGLang declares CUDA's torch and a hundred packages that these tests never import, so it and what
# would bring torch along (torchvision, triton) come without their dependencies. A failed run can be
# repeated. TORCH names another build of torch.
set -euo pipefail
venv=${1:?usage: install.sh VENV [PYTHON]}
python=${2:-python3.11}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip "${TORCH:-torch==2.13.0}"
pip -r "$here/requirements.txt"
pip --no-deps sglang==0.5.23 triton==3.9.0 compressed-tensors==0.20.1 torchvision==0.28.0

found=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
case ${TORCH:-torch==2.13.0} in
*"==${found%%+*}"*) ;;
*) echo "torch is $found: a package has replaced it (remove $venv and try again)" >&2; exit 1 ;;
esac
