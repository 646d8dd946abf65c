"""Environment variables of our own programs, whichever backend starts them."""

PROGRAM_ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that spin while they wait lose most of their time on a machine that does other work too; threads that sleep at
    # once are woken thousands of times a second: 49,000 context switches against 5,000, and a tenth of a step.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
}
