"""A mail by SMTP.

    send_mail(destination.mail, "ERROR: replica-drift at step 12, rank 3", "...", seconds=10.0)      # or NotSent

A password is sent over TLS only, or to this machine itself.
"""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
from contextlib import suppress
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from time import monotonic

from ds_silent.alerts.failure import NotSent, why_of
from ds_silent.destination import Mail


def send_mail(mail: Mail, subject: str, text: str, seconds: float) -> None:
    """Raises:
    NotSent: the server did not take it.
    """
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, mail.sender, ", ".join(mail.recipients)
    message["Date"], message["Message-ID"] = formatdate(), make_msgid(domain=mail.sender.rpartition("@")[2])
    message["Auto-Submitted"] = "auto-generated"  # no absence notes in return
    message.set_content(text)
    until = monotonic() + seconds
    server: smtplib.SMTP | None = None
    timer = threading.Timer(seconds, lambda: _shut(server))  # a socket's time-out starts anew with every line
    timer.daemon = True
    timer.start()
    try:
        server = _connected(mail, seconds)
        refused = server.send_message(message)
        if refused:
            raise NotSent(f"the server refused {len(refused)} of {len(mail.recipients)} recipients", again=False)
        with suppress(Exception):  # it has the mail: a bad farewell is no reason to send it again
            server.quit()
    except NotSent:
        raise
    except smtplib.SMTPAuthenticationError as error:
        raise NotSent(f"the server did not accept the user and password ({error.smtp_code})", again=False) from None
    except smtplib.SMTPRecipientsRefused as error:
        codes = sorted({code for code, _ in error.recipients.values()})
        why = f"the server refused all recipients ({', '.join(map(str, codes))})"
        raise NotSent(why, again=all(code < 500 for code in codes)) from None
    except smtplib.SMTPResponseException as error:
        raise NotSent(f"the server answered {error.smtp_code}", again=error.smtp_code < 500) from None
    except Exception as error:
        if monotonic() >= until or isinstance(error, TimeoutError):
            raise NotSent(f"the server did not answer within {seconds:g} s") from None
        again = not isinstance(error, (ssl.SSLCertVerificationError, smtplib.SMTPNotSupportedError))
        raise NotSent(f"the server could not be reached: {why_of(error)}", again=again) from None
    finally:
        timer.cancel()
        if server is not None:
            server.close()


def _connected(mail: Mail, seconds: float) -> smtplib.SMTP:
    if mail.encrypted:
        context = ssl.create_default_context()
        server: smtplib.SMTP = smtplib.SMTP_SSL(mail.host, mail.port, timeout=seconds, context=context)
    else:
        server = smtplib.SMTP(mail.host, mail.port, timeout=seconds)
    try:
        server.ehlo()
        if not mail.encrypted and server.has_extn("starttls"):
            server.starttls(context=_context(mail))
            server.ehlo()
        elif not mail.encrypted and mail.password is not None and not mail.is_here:
            why = "the server offers no encryption, and a password is not sent without: use smtps://, or no password"
            raise NotSent(why, again=False)
        if mail.user is not None and mail.password is not None:
            server.login(mail.user, mail.password)
    except BaseException:
        server.close()
        raise
    return server


def _context(mail: Mail) -> ssl.SSLContext:
    """A mail server of this machine shows a certificate that it has made itself, if any."""
    context = ssl.create_default_context()
    if mail.is_here:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _shut(server: smtplib.SMTP | None) -> None:
    held = getattr(server, "sock", None)
    if held is not None:
        with suppress(OSError):
            socket.socket.shutdown(held, socket.SHUT_RDWR)
