"""Storage options of S3 and Azure, by the names that s3fs and adlfs gave them.

Credentials that no option gives are those that boto3 and azure-identity find.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from precache.errors import UsageError, missing_library
from precache.storage import retries
from precache.storage.backends import user_agent
from precache.storage.base import FileInfo

S3_OPTIONS = frozenset(
    ("key", "secret", "token", "anon", "profile", "endpoint_url", "client_kwargs", "requester_pays")
)
S3_CLIENT_OPTIONS = frozenset(("endpoint_url", "region_name", "verify"))
"""Keys of the option ``client_kwargs``."""

AZURE_OPTIONS = frozenset(
    ("account_name", "account_key", "sas_token", "connection_string", "credential", "anon",
     "account_host", "tenant_id", "client_id", "client_secret")
)  # fmt: skip

TEXT_OPTIONS = (S3_OPTIONS | AZURE_OPTIONS) - {"anon", "requester_pays", "client_kwargs"}
"""Options whose values are text, also those that look like numbers."""

CREDENTIALS_LAST = timedelta(minutes=5)
"""Time that credentials are said to last: to obstore they expire in that time at once, so that it
asks again, at most ten times a second. boto3 renews those that expire earlier."""

UPLOAD_SECONDS = 600
"""Time for a part of a large object to be sent: to obstore, a server that still receives is silent.
"""

ListAnyKeys = Callable[[str, str, str | None], tuple[list[FileInfo], str | None]]
"""(prefix, name below it to begin after, token) -> objects by keys, token of the next page."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """A bucket as obstore reads and writes it.

    Attributes
    ----------
    reads, writes
        obstore's stores; the latter waits longer for an answer.
    ordered
        Whether listings come in order and can begin at any name.
    list_any_keys
        Lists through the service's own library, which takes keys that obstore refuses.
    """

    reads: Any
    writes: Any
    ordered: bool
    list_any_keys: ListAnyKeys


def open_bucket(kind: str, name: str, options: Mapping[str, Any]) -> Bucket:
    """Connect a bucket or container.

    Parameters
    ----------
    kind
        ``s3`` or ``azure``.

    Raises
    ------
    UsageError
        An option is unknown, or there are no credentials.
    """
    options = {
        key: str(value) if key in TEXT_OPTIONS and type(value) is int else value
        for key, value in options.items()
    }
    try:
        return _open_s3(name, options) if kind == "s3" else _open_azure(name, options)
    except UsageError:
        raise
    except ImportError:
        raise missing_library("this service", None, kind) from None
    except Exception as error:  # of credentials and certificates, the libraries raise anything
        raise UsageError(
            f"cannot connect to {name} ({type(error).__name__}); check the storage options, the "
            "variables of the environment that the service's tools read, and SSL_CERT_FILE"
        ) from None


def described(name: str, size: int, modified: datetime, etag: str | None) -> FileInfo:
    """Describe an object of S3 or Azure."""
    return FileInfo(name, size, int(modified.timestamp() * 1e6) * 1000, (etag or "").strip('"'))


def _require_known(options: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(
            f"unknown {where} {', '.join(map(repr, unknown))}; known are {', '.join(sorted(known))}"
        )


def _is_true(options: Mapping[str, Any], name: str) -> bool:
    """Return whether an option is set; on the command line it may be text."""
    value = options.get(name)
    return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)


def _stores(
    make: Callable[..., Any], bucket: str, client: Mapping[str, Any], **config: Any
) -> Iterator[Any]:
    """Yield a store for reads and another for large writes."""
    certificate = os.environ.get("SSL_CERT_FILE")
    client = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=retries.CONNECT_SECONDS),
        "timeout": timedelta(days=1),
        "user_agent": user_agent(),
        **({"root_certificate": Path(certificate).read_bytes()} if certificate else {}),
        **client,
    }
    for silent in (retries.SILENT_SECONDS, UPLOAD_SECONDS):
        waiting = {**client, "read_timeout": timedelta(seconds=silent)}
        yield make(bucket, client_options=waiting, retry_config={"max_retries": 0}, **config)


# --- S3 -----------------------------------------------------------------------------------------


def _open_s3(bucket: str, options: Mapping[str, Any]) -> Bucket:
    from obstore.store import S3Store

    client_options = options.get("client_kwargs") or {}
    _require_known(options, S3_OPTIONS, "storage option of s3://")
    _require_known(client_options, S3_CLIENT_OPTIONS, "key of client_kwargs")
    anonymous, verify = _is_true(options, "anon"), client_options.get("verify")
    requester_pays = _is_true(options, "requester_pays")
    if bool(options.get("key")) != bool(options.get("secret")):
        raise UsageError("key and secret of s3:// go together; give both or neither")
    directory = bucket.endswith("--x-s3")
    boto3 = _Boto3(options, client_options)
    session, client = boto3.connected()
    config: dict[str, Any] = {
        **_location(client, bucket),
        "skip_signature": anonymous,
        "copy_if_not_exists": "multipart",
        "request_payer": requester_pays,
        "s3_express": directory,
        "virtual_hosted_style_request": False,
    }
    if directory:  # whose endpoint obstore makes of the bucket's name
        del config["endpoint"], config["virtual_hosted_style_request"]
    if not anonymous:
        if session.get_credentials() is None:
            raise UsageError(
                "there are no credentials for s3://; give key and secret as storage options, or "
                "as boto3 finds them, or anon=true for a bucket that is public"
            )
        config["credential_provider"] = boto3
    tls: dict[str, Any] = {"allow_invalid_certificates": True} if verify is False else {}
    if isinstance(verify, str):
        tls = {"root_certificate": Path(verify).read_bytes()}
    reads, writes = _stores(S3Store, bucket, tls, **config)
    return Bucket(reads, writes, not directory, partial(_list_s3, boto3, bucket, requester_pays))


class _Boto3:
    """Credentials and a client as boto3 makes them; anew once files change that may hold keys."""

    def __init__(self, options: Mapping[str, Any], client_options: Mapping[str, Any]) -> None:
        self._options = options, client_options
        self._made: tuple[Any, Any, Any] = None, None, None

    def __call__(self) -> Any:
        """Return credentials as obstore takes them."""
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider(self.connected()[0], ttl=CREDENTIALS_LAST)()

    def connected(self) -> tuple[Any, Any]:
        """Return a session of boto3 and a client for S3 that never retries."""
        files = [_identity(_CREDENTIALS), _identity(_CONFIG)]
        before, session, client = self._made
        if files != before:
            session, client = _connect_boto3(*self._options)
            self._made = files, session, client
        return session, client


_CREDENTIALS = "AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"
_CONFIG = "AWS_CONFIG_FILE", "~/.aws/config"
"""Files of boto3: the variable of the environment that names one, and its usual place."""


def _identity(file: tuple[str, str]) -> tuple[int, ...]:
    """Return numbers that change with a file; none if there is no such file."""
    variable, usual = file
    try:
        status = Path(os.environ.get(variable) or usual).expanduser().stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _connect_boto3(
    options: Mapping[str, Any], client_options: Mapping[str, Any]
) -> tuple[Any, Any]:
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    session = boto3.Session(
        aws_access_key_id=options.get("key"),
        aws_secret_access_key=options.get("secret"),
        aws_session_token=options.get("token"),
        profile_name=options.get("profile"),
        region_name=client_options.get("region_name"),
    )
    client = session.client(
        "s3",
        endpoint_url=options.get("endpoint_url") or client_options.get("endpoint_url"),
        verify=client_options.get("verify"),
        config=Config(
            signature_version=UNSIGNED if _is_true(options, "anon") else None,
            connect_timeout=retries.CONNECT_SECONDS,
            read_timeout=retries.SILENT_SECONDS,
            retries={"total_max_attempts": 1},
            user_agent_extra=user_agent(),
        ),
    )
    return session, client


def _location(client: Any, bucket: str) -> dict[str, str]:
    """Return the region of a bucket and its endpoint, which obstore must not look for itself."""
    region, endpoint = client.meta.region_name or "us-east-1", client.meta.endpoint_url.rstrip("/")
    if endpoint in ("https://s3.amazonaws.com", f"https://s3.{region}.amazonaws.com"):
        region = _region(client, bucket) or region
        endpoint = f"https://s3.{region}.amazonaws.com"
    return {"region": region, "endpoint": endpoint}


def _list_s3(
    boto3: _Boto3, bucket: str, requester_pays: bool, prefix: str, after: str, token: str | None
) -> tuple[list[FileInfo], str | None]:
    optional = {
        "ContinuationToken": token,
        "StartAfter": f"{prefix}{after}" if after else None,
        "RequestPayer": "requester" if requester_pays else None,
    }
    parameters = {name: value for name, value in optional.items() if value}
    answer = boto3.connected()[1].list_objects_v2(Bucket=bucket, Prefix=prefix, **parameters)
    files = [
        described(item["Key"], item["Size"], item["LastModified"], item["ETag"])
        for item in answer.get("Contents", ())
    ]
    return files, answer.get("NextContinuationToken")


def _region(client: Any, bucket: str) -> str | None:
    """Return the region of a bucket of Amazon's, also to users who may only read its objects."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    except BotoCoreError:
        return None
    region: str | None = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
    return region


# --- Azure --------------------------------------------------------------------------------------


def _open_azure(bucket: str, options: Mapping[str, Any]) -> Bucket:
    from obstore.store import AzureStore

    _require_known(options, AZURE_OPTIONS, "storage option of az://")
    container, _, host = bucket.partition("@")
    options = _with_environment(options)
    parts = dict(
        part.strip().partition("=")[::2]
        for part in str(options.get("connection_string") or "").split(";")
    )
    account = options.get("account_name") or parts.get("AccountName") or host.partition(".")[0]
    endpoint = parts.get("BlobEndpoint")
    if not account and endpoint:
        account = endpoint.partition("://")[2].partition(".")[0]
    if not account:
        raise UsageError(
            "az:// needs the name of an account; give account_name or connection_string as a "
            "storage option or in the environment (AZURE_STORAGE_ACCOUNT_NAME); check the "
            "credentials and the storage options"
        )
    if not endpoint:
        scheme = parts.get("DefaultEndpointsProtocol", "https")
        suffix = parts.get("EndpointSuffix", "core.windows.net")
        endpoint = f"{scheme}://{options.get('account_host') or f'{account}.blob.{suffix}'}"
    config: dict[str, Any] = {"account_name": account, "endpoint": endpoint.rstrip("/")}
    credential = _azure_credential(options, parts)
    if credential is None:
        config["skip_signature"] = True
    else:
        config["credential_provider"] = _azure_provider(credential)

    def list_any_keys(
        prefix: str, after: str, token: str | None
    ) -> tuple[list[FileInfo], str | None]:
        from azure.storage.blob import ContainerClient

        own = credential
        if isinstance(own, dict):
            key = own.get("access_key")
            own = {"account_name": account, "account_key": key} if key else own["sas_token"]
        with ContainerClient(
            endpoint, container, own, retry_total=0, user_agent=user_agent()
        ) as client:
            pages: Any = client.list_blobs(name_starts_with=prefix).by_page(token)
            listed = list(next(pages))
        files = [described(b.name, b.size, b.last_modified, b.etag) for b in listed]
        return files, pages.continuation_token

    reads, writes = _stores(AzureStore, container, {}, **config)
    return Bucket(reads, writes, False, list_any_keys)


def _with_environment(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add options from the variables of the environment that Azure's tools read."""
    names = "account_name", "account_key", "sas_token", "connection_string"
    defaults = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in names}
    explicit = {"account_key", "sas_token", "connection_string", "credential", "client_secret"}
    if explicit & set(options) or _is_true(options, "anon"):
        defaults = {"account_name": defaults["account_name"]}
    return {**{name: value for name, value in defaults.items() if value}, **options}


def _azure_credential(options: Mapping[str, Any], parts: Mapping[str, str]) -> Any:
    """Return a key or signature as obstore takes them, a credential of azure-identity, or None."""
    credential = options.get("credential")
    key = options.get("account_key") or parts.get("AccountKey")
    signature = options.get("sas_token") or parts.get("SharedAccessSignature")
    if isinstance(credential, str):
        key, signature = (key, credential) if "sig=" in credential else (credential, signature)
    elif credential is not None:
        return credential
    if key:
        return {"access_key": key, "expires_at": None}
    if signature:
        return {"sas_token": signature.removeprefix("?"), "expires_at": None}
    if _is_true(options, "anon"):
        return None
    from azure.identity import ClientSecretCredential, DefaultAzureCredential

    if options.get("client_secret"):
        return ClientSecretCredential(
            options.get("tenant_id") or "", options.get("client_id") or "", options["client_secret"]
        )
    return DefaultAzureCredential()


def _azure_provider(credential: Any) -> Callable[[], Any]:
    if isinstance(credential, dict):
        return lambda: credential
    from obstore.auth.azure import AzureCredentialProvider

    return AzureCredentialProvider(credential)
