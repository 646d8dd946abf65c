"""Tags of runs that MLflow's clients and user interface give a meaning to."""

NAME_TAG = "mlflow.runName"
PARENT_TAG = "mlflow.parentRunId"
COMMIT_TAG = "mlflow.source.git.commit"
SOURCE_NAME_TAG = "mlflow.source.name"
SOURCE_TYPE_TAG = "mlflow.source.type"
LOGGED_MODELS_TAG = "mlflow.log-model.history"
