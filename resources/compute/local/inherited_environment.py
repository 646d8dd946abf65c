"""Variables of this process that a job on this machine inherits: an allow-list, so that it is given no secret of the stack.

The database's address, tokens of the person who started the stack and settings stay out. A job declares what else it needs
(`env`). Keys of the object store are given where the store needs some.
"""

from collections.abc import Mapping

from recipes.contracts.job import StoreAddress

NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "CC", "CXX"),
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "MALLOC_", "PIP_", "UV_", "MLFLOW_HTTP_REQUEST_", "MLFLOW_ENABLE_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "HIP_", "HSA_", "ROCR_"),
    *("TORCH", "PYTORCH_", "TRITON_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "POLARS_", "RAYON_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_"),
)
STORE_PREFIX = "AWS_"
"""What the S3 library takes its keys, region and certificates from."""


def inherited_environment(variables: Mapping[str, str], store: StoreAddress) -> dict[str, str]:
    """The variables that a job of this store inherits."""
    prefixes = (*PREFIXES, STORE_PREFIX) if needs_keys(store) else PREFIXES
    return {name: value for name, value in variables.items() if name in NAMES or name.startswith(prefixes)}


def needs_keys(store: StoreAddress) -> bool:
    """Whether programs sign in to the object store: not to a folder, and not where the API signs for them."""
    return store.root.startswith(("http://", "https://"))
