"""Response messages of MLflow's REST API. Unset fields are left out, as in protobuf."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

State = Literal["active", "deleted"]
RunStatus = Literal["RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"]
ModelStatus = Literal["LOGGED_MODEL_PENDING", "LOGGED_MODEL_READY", "LOGGED_MODEL_UPLOAD_FAILED"]
VersionStatus = Literal["PENDING_REGISTRATION", "FAILED_REGISTRATION", "READY"]
Stage = Literal["None", "Staging", "Production", "Archived"]


class PairMessage(TypedDict):
    key: str
    value: str


class PointMessage(TypedDict):
    key: str
    value: float | Literal["NaN"]
    timestamp: int
    step: int


class PointOfRunMessage(PointMessage):
    run_id: str


class PointOfModelMessage(PointOfRunMessage):
    model_id: str
    dataset_name: NotRequired[str]
    dataset_digest: NotRequired[str]


class ExperimentMessage(TypedDict):
    experiment_id: str
    name: str
    artifact_location: str
    lifecycle_stage: State
    creation_time: int
    last_update_time: int
    tags: list[PairMessage]


class RunInfoMessage(TypedDict):
    run_id: str
    run_uuid: str
    run_name: str
    experiment_id: str
    user_id: str
    status: RunStatus
    artifact_uri: str
    lifecycle_stage: State
    start_time: NotRequired[int]
    end_time: NotRequired[int]


class RunDataMessage(TypedDict):
    metrics: list[PointMessage]
    params: list[PairMessage]
    tags: list[PairMessage]


class DatasetMessage(TypedDict):
    name: str
    digest: str
    source_type: str
    source: str
    schema: NotRequired[str]
    profile: NotRequired[str]


class DatasetInputMessage(TypedDict):
    tags: list[PairMessage]
    dataset: DatasetMessage


class ModelInputMessage(TypedDict):
    model_id: str


class ModelOutputMessage(ModelInputMessage):
    step: int


class RunInputsMessage(TypedDict):
    dataset_inputs: NotRequired[list[DatasetInputMessage]]
    model_inputs: NotRequired[list[ModelInputMessage]]


class RunOutputsMessage(TypedDict):
    model_outputs: NotRequired[list[ModelOutputMessage]]


class RunMessage(TypedDict):
    info: RunInfoMessage
    data: RunDataMessage
    inputs: RunInputsMessage
    outputs: RunOutputsMessage


class FileMessage(TypedDict):
    path: str
    is_dir: bool
    file_size: NotRequired[int]


class DatasetSummaryMessage(TypedDict):
    experiment_id: str
    name: str
    digest: str
    context: NotRequired[str]


class RegistrationMessage(TypedDict):
    name: str
    version: str


class LoggedModelInfoMessage(TypedDict):
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
    status_message: NotRequired[str]


class LoggedModelDataMessage(TypedDict):
    params: list[PairMessage]
    metrics: NotRequired[list[PointOfModelMessage]]


class LoggedModelMessage(TypedDict):
    info: LoggedModelInfoMessage
    data: LoggedModelDataMessage


class VersionMessage(TypedDict):
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
    status_message: NotRequired[str]
    model_id: NotRequired[str]
    tags: NotRequired[list[PairMessage]]
    aliases: NotRequired[list[str]]


class AliasMessage(TypedDict):
    alias: str
    version: str


class RegisteredModelMessage(TypedDict):
    name: str
    creation_timestamp: int
    last_updated_timestamp: int
    description: NotRequired[str]
    latest_versions: NotRequired[list[VersionMessage]]
    tags: NotRequired[list[PairMessage]]
    aliases: NotRequired[list[AliasMessage]]


class PartUrlMessage(TypedDict):
    url: str
    part_number: int
    headers: dict[str, str]


class NothingAnswer(TypedDict):
    """An empty response of success."""


class ExperimentIdAnswer(TypedDict):
    experiment_id: str


class ExperimentAnswer(TypedDict):
    experiment: ExperimentMessage


class ExperimentsAnswer(TypedDict):
    experiments: list[ExperimentMessage]
    next_page_token: NotRequired[str]


class RunAnswer(TypedDict):
    run: RunMessage


class RunInfoAnswer(TypedDict):
    run_info: RunInfoMessage


class RunsAnswer(TypedDict):
    runs: list[RunMessage]
    next_page_token: NotRequired[str]


class HistoryAnswer(TypedDict):
    metrics: list[PointMessage]
    next_page_token: NotRequired[str]


class HistoryOfRunsAnswer(TypedDict):
    metrics: list[PointOfRunMessage]


class ProxiedFilesAnswer(TypedDict):
    files: list[FileMessage]


class FilesAnswer(ProxiedFilesAnswer):
    root_uri: str


class UploadAnswer(TypedDict):
    upload_id: str
    credentials: list[PartUrlMessage]


class DownloadUrlAnswer(TypedDict):
    url: str
    headers: dict[str, str]
    file_size: int


class DatasetSummariesAnswer(TypedDict):
    dataset_summaries: list[DatasetSummaryMessage]


class LoggedModelAnswer(TypedDict):
    model: LoggedModelMessage


class LoggedModelsAnswer(TypedDict):
    models: list[LoggedModelMessage]
    next_page_token: NotRequired[str]


class RegisteredModelAnswer(TypedDict):
    registered_model: RegisteredModelMessage


class RegisteredModelsAnswer(TypedDict):
    registered_models: NotRequired[list[RegisteredModelMessage]]
    next_page_token: NotRequired[str]


class VersionAnswer(TypedDict):
    model_version: VersionMessage


class LatestVersionsAnswer(TypedDict):
    model_versions: NotRequired[list[VersionMessage]]


class VersionsAnswer(LatestVersionsAnswer):
    next_page_token: NotRequired[str]


class VersionUriAnswer(TypedDict):
    artifact_uri: str


class ServerInfoAnswer(TypedDict):
    store_type: str
    workspaces_enabled: bool
    trace_archival_enabled: bool
    multipart_uploads_enabled: bool
    multipart_downloads_enabled: bool
    presigned_upload_run_id_supported: bool
    presigned_upload_model_id_supported: bool
    features_enabled: dict[str, bool]
