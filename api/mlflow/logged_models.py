"""/mlflow/logged-models/*: none can be created yet, so a search truthfully finds none.

It must answer all the same: MLflow's clients search here before they list or download the files of a run.
"""

from fastapi import APIRouter, Response

from api.mlflow.messages import answer
from api.requests import Body, StrictRoute

router = APIRouter(prefix="/mlflow/logged-models", tags=["mlflow"], route_class=StrictRoute)


class SearchLoggedModels(Body):
    experiment_ids: tuple[str, ...]


@router.post("/search")
def search(_: SearchLoggedModels) -> Response:
    # None can be created on this server, so none is found; mlflow's client asks before it lists a subfolder.
    return answer(models=[])
