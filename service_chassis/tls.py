"""TLS of servers and channels from PEM files, which are read again when they change.

A new version is taken for the connections made after it; those that are open go on, with every stream on them. One that
cannot be used (half written, another key's certificate) leaves the version before in force and is logged.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from service_chassis.errors import ConfigurationError
from service_chassis.watched_files import WatchedFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where the PEM files of one side are. An empty path: that part is not there."""

    certificate: str = ""  # ours, with what lies between it and the authority
    key: str = ""
    ca: str = ""  # who must have signed the other side's

    def paths(self) -> tuple[str, ...]:
        """Return those that are given."""
        return tuple(filter(None, (self.certificate, self.key, self.ca)))


@dataclass(frozen=True, slots=True)
class Pems:
    """What the files hold. None where there is none."""

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None


class UnusableFile(ValueError):
    """A file that is no good, by its place in ``TlsFiles``."""

    def __init__(self, place: str, path: str, rule: str) -> None:
        super().__init__(f"{path}: {rule}")
        self.place = place
        self.path = path
        self.rule = rule


def read_pems(files: TlsFiles) -> Pems:
    """Read the files and check that they can be used together.

    Raises:
        UnusableFile: one of them cannot.
    """
    certificate = _read("certificate", files.certificate)
    key = _read("key", files.key)
    ca = _read("ca", files.ca)
    if certificate is not None:
        _check_certificates("certificate", files.certificate, certificate)
    if ca is not None:
        _check_certificates("ca", files.ca, ca)
    if certificate is not None and key is not None:
        _check_pair(files)
    return Pems(certificate, key, ca)


def _read(place: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnusableFile(place, path, f"cannot be read: {error.strerror or error}") from error


def _check_certificates(place: str, path: str, pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise UnusableFile(place, path, "is not a PEM file with certificates") from error


def _check_pair(files: TlsFiles) -> None:
    try:
        # OpenSSL would ask for a password on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password=lambda: "")
    except OSError as error:  # SSLError is one
        reason = getattr(error, "reason", None) or ""
        if "MISMATCH" in reason:
            rule = f"is not the key of the certificate in {files.certificate}"
        else:
            rule = "is not an unencrypted PEM file with a private key"
        raise UnusableFile("key", files.key, rule) from error


class ServerTls:
    """What a server shows, and whom it lets connect."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. With ``files.ca`` every client needs a certificate that it signed.

        Raises:
            UnusableFile: one of them is no good.
        """
        assert all((files.certificate, files.key)), "a server without a certificate has no TLS"
        self.files = files
        self._watched = WatchedFiles(files.paths(), lambda: read_pems(files), what="the server's certificate")

    @property
    def requires_certificates(self) -> bool:
        """Whether clients must show one."""
        return bool(self.files.ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of one port."""
        pems, generation = self._watched.present()
        used = generation

        def renew() -> grpc.ServerCertificateConfiguration | None:
            # On a thread of grpc's, before every handshake.
            nonlocal used
            pems, generation = self._watched.present()
            if generation == used:
                return None
            used = generation
            return _configuration(pems)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(pems),
            renew,  # type: ignore[arg-type]  # None is for no change
            self.requires_certificates,
        )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    assert pems.certificate is not None
    assert pems.key is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.ca)


class ClientTls:
    """How channels of one kind know their server, and what they show it."""

    def __init__(self, files: TlsFiles, *, server_name: str = "") -> None:
        """Read the files.

        Args:
            files: without ``ca`` the system's authorities are trusted, without ``certificate`` none is shown.
            server_name: what the server's certificate must be for, where that is not the host that is connected to.

        Raises:
            UnusableFile: one of them is no good.
        """
        self.server_name = server_name
        self._watched = WatchedFiles(files.paths(), lambda: read_pems(files), what="a client's certificate")

    @property
    def generation(self) -> int:
        """A number that grows when ``credentials`` would return others."""
        return self._watched.present()[1]

    def credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of the files as they are now."""
        pems, _ = self._watched.present()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)


def server_tls(files: TlsFiles, fields: dict[str, str]) -> ServerTls | None:
    """Return the TLS of a server, None where it has none.

    Args:
        files: of the configuration.
        fields: the configuration's names of ``certificate``, ``key`` and ``ca``.
    Raises:
        ConfigurationError: a file is no good.
    """
    if not files.certificate:
        return None
    try:
        return ServerTls(files)
    except UnusableFile as error:
        raise ConfigurationError([(fields[error.place], error.path, error.rule)]) from error


def client_tls(files: TlsFiles, fields: dict[str, str], *, server_name: str = "") -> ClientTls:
    """Return the TLS of channels. Raises as ``server_tls`` does."""
    try:
        return ClientTls(files, server_name=server_name)
    except UnusableFile as error:
        raise ConfigurationError([(fields[error.place], error.path, error.rule)]) from error
