"""What an S3 server answered, or why it did not, in one line that names the settings to look at. Pure.

The library's line ends where the server's answer begins, and has nothing of why there was none: a certificate that was not
trusted read as a server that is away.
"""

import re

STATUS = re.compile(r"status code: (\d{3} [\w ]+)")
CODE = re.compile(r"<Code>(\w+)</Code>")
MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
OF_THE_SYSTEM = re.compile(r'(?:message|error): "([^"]*)"')
REFUSALS = ("401", "403")
NO_BUCKET = "NoSuchBucket"


def refuses(error: str) -> bool:
    """Whether a server said what it will say until a setting, or what is allowed there, is another one."""
    status = STATUS.search(error)
    return NO_BUCKET in error or (status is not None and status[1].startswith(REFUSALS))


def told(error: str, endpoint: str, bucket: str) -> str:
    """`error` is the text of what the library raised when it asked a bucket at an endpoint."""
    if refused := CERTIFICATE.search(error):
        remedy = "setting storage.endpoint; the variable SSL_CERT_FILE names a file with other authorities"
        return f"the certificate of {endpoint} is not trusted: {refused[1]} ({remedy})"
    status, code, message = STATUS.search(error), CODE.search(error), MESSAGE.search(error)
    if status:
        answer = ": ".join([status[1].strip(), *(found[1] for found in (code, message) if found)])
        if code and code[1] == NO_BUCKET:
            return f"{endpoint} has no bucket {bucket} (settings storage.buckets, storage.endpoint)"
        if answer.startswith(REFUSALS):
            keys = "settings storage.access_key, storage.secret_key"
            return f"{endpoint} refuses what the keys are used for, with {answer} ({keys})"
        return f"{endpoint} answers {answer}"
    if "HTTP error" in error:
        why = OF_THE_SYSTEM.search(error)
        return f"{endpoint} does not answer: {why[1] if why else 'the connection broke'} (setting storage.endpoint)"
    return error.splitlines()[0][:500]
