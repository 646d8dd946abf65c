"""Allow-list of environment variables that a local job inherits.

It excludes the stack's secrets: database address, settings, and tokens of the user who started the stack. A job declares
other variables in `env`. Keys of the object store are inherited if the store needs them.
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
"""Variables from which the S3 library reads its keys, region and certificates."""


def inherited_environment(variables: Mapping[str, str], store: StoreAddress) -> dict[str, str]:
    """Return the variables that a job using this store inherits."""
    prefixes = (*PREFIXES, STORE_PREFIX) if needs_keys(store) else PREFIXES
    return {name: value for name, value in variables.items() if name in NAMES or name.startswith(prefixes)}


def needs_keys(store: StoreAddress) -> bool:
    """Return whether programs need keys for the object store.

    They need none for a folder, or if the API signs their requests.
    """
    return store.root.startswith(("http://", "https://"))
