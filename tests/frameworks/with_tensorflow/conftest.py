# SPDX-License-Identifier: Apache-2.0
import os
from importlib.util import find_spec

if find_spec("tensorflow"):  # other environments collect this folder, too
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
