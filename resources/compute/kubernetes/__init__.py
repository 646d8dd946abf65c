"""Jobs as gangs of pods on a Kubernetes cluster.

- `backend`: used by supervisors. It reads and writes rows of `cluster_jobs`, and reads logs from the object store.
- `controller`: the only process that calls the API server. While it is the leader (`leader`), it creates, follows and
  deletes the objects of all jobs (`submission`), based on local mirrors of the cluster's state (`watch`, `view`).
- Decisions are pure functions: `gang`, `pod_manifest`, `job_manifest` and `gangs` render a job's objects; `states` parses
  their status; `phases`, `endings` and `exits` decide the phase of a job and why its attempts ended.
- `setup` is for administrators who install a cluster: `hanzo-ml cluster render` and `hanzo-ml cluster check`.
"""
