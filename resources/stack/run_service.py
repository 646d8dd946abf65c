"""Run one service of the stack in a container: `python -m resources.stack.run_service NAME`.

This process is replaced by the service, with the same command and environment as `hanzo-ml up` uses on a laptop.
"""

import os
import sys
from typing import NoReturn

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.installation import SOURCE
from resources.settings.settings import Settings
from resources.stack.services import Service, list_services, service_environment


def find_service(settings: Settings, name: str) -> Service:
    """Return a service by name.

    Raises:
        BadConfiguration: the settings have no such service.
    """
    services = {service.name: service for service in list_services(settings)}
    if name not in services:
        raise BadConfiguration(f"no service {name!r} with these settings: use one of {', '.join(services)}")
    return services[name]


def main(arguments: list[str]) -> int:
    """Execute the named service; return only on an error."""
    try:
        [name] = arguments
    except ValueError:
        print(f"usage: python -m {__spec__.name} NAME", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    try:
        settings = Settings.load()
        service = find_service(settings, name)
    except BadConfiguration as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return execute(settings, service)


def execute(settings: Settings, service: Service) -> NoReturn:
    for folder in (settings.home, settings.run_workers):
        folder.mkdir(parents=True, exist_ok=True)
    os.chdir(SOURCE)
    os.execve(service.command[0], service.command, {**os.environ, **service_environment(settings), **service.env})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
