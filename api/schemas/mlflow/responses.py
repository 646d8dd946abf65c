"""The answers of MLflow's API, message by message, for the OpenAPI document. What makes them is in `api.mlflow`.

Nothing is made of these classes: they are read when the document is asked for. A field with a default may be left out.
"""

from typing import Literal

import msgspec

State = Literal["active", "deleted"]
RunStatus = Literal["RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"]
ModelStatus = Literal["LOGGED_MODEL_PENDING", "LOGGED_MODEL_READY", "LOGGED_MODEL_UPLOAD_FAILED"]
VersionStatus = Literal["PENDING_REGISTRATION", "FAILED_REGISTRATION", "READY"]
Stage = Literal["None", "Staging", "Production", "Archived"]


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every message."""


class PairMessage(Message):
    key: str
    value: str


class PointMessage(Message):
    key: str
    value: float | Literal["NaN"]
    timestamp: int
    step: int


class PointOfRunMessage(PointMessage):
    run_id: str


class PointOfModelMessage(PointOfRunMessage):
    model_id: str
    dataset_name: str = ""
    dataset_digest: str = ""


class ExperimentMessage(Message):
    experiment_id: str
    name: str
    artifact_location: str
    lifecycle_stage: State
    creation_time: int
    last_update_time: int
    tags: list[PairMessage]


class RunInfoMessage(Message):
    run_id: str
    run_uuid: str
    run_name: str
    experiment_id: str
    user_id: str
    status: RunStatus
    artifact_uri: str
    lifecycle_stage: State
    start_time: int = 0
    end_time: int = 0


class RunDataMessage(Message):
    metrics: list[PointMessage]
    params: list[PairMessage]
    tags: list[PairMessage]


class DatasetMessage(Message):
    name: str
    digest: str
    source_type: str
    source: str
    schema: str = ""
    profile: str = ""


class DatasetInputMessage(Message):
    tags: list[PairMessage]
    dataset: DatasetMessage


class ModelInputMessage(Message):
    model_id: str


class ModelOutputMessage(ModelInputMessage):
    step: int


class RunInputsMessage(Message):
    dataset_inputs: list[DatasetInputMessage] = []
    model_inputs: list[ModelInputMessage] = []


class RunOutputsMessage(Message):
    model_outputs: list[ModelOutputMessage] = []


class RunMessage(Message):
    info: RunInfoMessage
    data: RunDataMessage
    inputs: RunInputsMessage
    outputs: RunOutputsMessage


class FileMessage(Message):
    path: str
    is_dir: bool
    file_size: int = 0


class DatasetSummaryMessage(Message):
    experiment_id: str
    name: str
    digest: str
    context: str = ""


class RegistrationMessage(Message):
    name: str
    version: str


class LoggedModelInfoMessage(Message):
    model_id: str
    experiment_id: str
    name: str
    creation_timestamp_ms: int
    last_updated_timestamp_ms: int
    artifact_uri: str
    status: ModelStatus
    model_type: str
    source_run_id: str
    tags: list[PairMessage]
    registrations: list[RegistrationMessage]
    status_message: str = ""


class LoggedModelDataMessage(Message):
    params: list[PairMessage]
    metrics: list[PointOfModelMessage] = []


class LoggedModelMessage(Message):
    info: LoggedModelInfoMessage
    data: LoggedModelDataMessage


class VersionMessage(Message):
    name: str
    version: str
    creation_timestamp: int
    last_updated_timestamp: int
    user_id: str
    current_stage: Stage
    description: str
    source: str
    run_id: str
    run_link: str
    status: VersionStatus
    status_message: str = ""
    model_id: str = ""
    tags: list[PairMessage] = []
    aliases: list[str] = []


class AliasMessage(Message):
    alias: str
    version: str


class RegisteredModelMessage(Message):
    name: str
    creation_timestamp: int
    last_updated_timestamp: int
    description: str = ""
    latest_versions: list[VersionMessage] = []
    tags: list[PairMessage] = []
    aliases: list[AliasMessage] = []


class PartUrlMessage(Message):
    url: str
    part_number: int
    headers: dict[str, str]


class NothingAnswer(Message):
    """That it is done."""


class ExperimentIdAnswer(Message):
    experiment_id: str


class ExperimentAnswer(Message):
    experiment: ExperimentMessage


class ExperimentsAnswer(Message):
    experiments: list[ExperimentMessage]
    next_page_token: str = ""


class RunAnswer(Message):
    run: RunMessage


class RunInfoAnswer(Message):
    run_info: RunInfoMessage


class RunsAnswer(Message):
    runs: list[RunMessage]
    next_page_token: str = ""


class HistoryAnswer(Message):
    metrics: list[PointMessage]
    next_page_token: str = ""


class HistoryOfRunsAnswer(Message):
    metrics: list[PointOfRunMessage]


class ProxiedFilesAnswer(Message):
    files: list[FileMessage]


class FilesAnswer(ProxiedFilesAnswer):
    root_uri: str


class UploadAnswer(Message):
    upload_id: str
    credentials: list[PartUrlMessage]


class DownloadUrlAnswer(Message):
    url: str
    headers: dict[str, str]
    file_size: int


class DatasetSummariesAnswer(Message):
    dataset_summaries: list[DatasetSummaryMessage]


class LoggedModelAnswer(Message):
    model: LoggedModelMessage


class LoggedModelsAnswer(Message):
    models: list[LoggedModelMessage]
    next_page_token: str = ""


class RegisteredModelAnswer(Message):
    registered_model: RegisteredModelMessage


class RegisteredModelsAnswer(Message):
    registered_models: list[RegisteredModelMessage] = []
    next_page_token: str = ""


class VersionAnswer(Message):
    model_version: VersionMessage


class LatestVersionsAnswer(Message):
    model_versions: list[VersionMessage] = []


class VersionsAnswer(LatestVersionsAnswer):
    next_page_token: str = ""


class VersionUriAnswer(Message):
    artifact_uri: str


class ServerInfoAnswer(Message):
    store_type: str
    workspaces_enabled: bool
    trace_archival_enabled: bool
    multipart_uploads_enabled: bool
    multipart_downloads_enabled: bool
    presigned_upload_run_id_supported: bool
    presigned_upload_model_id_supported: bool
    features_enabled: dict[str, bool]
