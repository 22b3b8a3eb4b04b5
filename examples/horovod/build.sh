#!/usr/bin/env bash
# Builds Horovod 0.28.1 with PyTorch and Gloo, without MPI and GPUs, against the torch of an environment, and installs it
# there: about 4 minutes on two cores. It needs a C++ compiler (Debian: g++).
#
#     build.sh ~/allranks-env/bin/python
#
# PyTorch needs C++20 since 2.14, and C++17 since 2.1; Horovod's files ask for C++14.
set -euo pipefail
python=${1:?usage: build.sh PYTHON}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/c++" <<'EOF'
#!/usr/bin/env bash
exec c++ "${@/#-std=c++1[14]/-std=gnu++20}"
EOF
chmod +x "$work/c++"
"$python" -m pip install --quiet 'setuptools<81' wheel 'cmake<4' cloudpickle packaging psutil pyyaml
PATH=$(dirname "$python"):$PATH
export PATH CXX="$work/c++"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
"$python" -m pip install --no-build-isolation --no-deps --no-binary horovod horovod==0.28.1
"$python" -c 'import horovod.torch as hvd; hvd.init(); print("Horovod works, built against torch", __import__("torch").__version__)'
