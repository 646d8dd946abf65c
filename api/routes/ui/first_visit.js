// How the web UI opens for who never chose: on training runs, not on prompts and traces, and without its tours, which lead
// to features of another server, or the notice of telemetry, which this server does not send. What somebody has chosen stays.
const choices = {
  "mlflow.workflowType_v1": "machine_learning",
  "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": true,
  "mlflow.detectIssues.guidanceShown_v1": true,
  "mlflow.flagForReview.guidanceShown_v1": true,
  "mlflow.home.getting-started.collapsed_v1": true,
  "mlflow.settings.telemetry.enabled_v1": false,
  "mlflow.telemetry.info.alert.dismissed_v1": true,
  "_mlflow_model_registry_promo_modal_dismissed_v1": true,
};
for (const [name, choice] of Object.entries(choices)) {
  if (localStorage.getItem(name) === null) localStorage.setItem(name, JSON.stringify(choice));
}
