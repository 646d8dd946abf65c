"""From a job to the Kubernetes objects that run it, as pure functions: the same job and settings give the same objects.

`gang` says what a job is on a cluster, `pod_manifest` what each of its pods is and how its processes start, `job_manifest`
renders it as a JobSet (behind Kueue) or an Indexed Job (a cluster without either) and writes YAML; `token_secret` is what
it signs in with. Sources: specification rows A6, G2, G4, H1-H3, H8, J3, J6, J7, X2, X3, X6, Z9, Z10 and
facts/kubernetes.md.

Only `TokenKeeper` calls a cluster. KubernetesCompute, which will submit these objects, with their token through it, and
follow them, comes beside this package as another `Compute`. Until it is there, jobs run as `LocalCompute` runs them.
"""
